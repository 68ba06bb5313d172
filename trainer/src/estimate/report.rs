//! The output of `trainer estimate`: a table, or JSON for programs.

use std::fmt;

use candlewick_ops::WeightStorage;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::search::by_cost;
use super::{
    Capacity, Category, DeviceKind, Estimate, FixedModes, Modes, Phase, Resource, Setup, Shortage, choose, estimate,
    format_bytes, max_row_tokens, parameters,
};
use crate::metrics::quantity;
use crate::plan::CheckpointingMode;
use crate::recipe::FloatDtype;

/// The estimate with its comparison. Its JSON is a stable interface: keys may be added, none changes its meaning.
#[derive(Clone, Debug, Serialize)]
pub struct EstimateReport {
    /// The version of the JSON format: 1.
    pub format: u32,
    /// The recipe's path.
    pub recipe: String,
    /// The name of the device that the estimate is compared with.
    pub device: String,
    /// The bytes of memory of that device; null if unknown.
    pub device_bytes: Option<u64>,
    /// Parameters of the model and its adapter.
    pub n_parameters: u64,
    /// Parameters that a token uses, of a mixture of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_active: Option<u64>,
    /// Trained parameters.
    pub n_trained: u64,
    /// The dtype of forward and backward.
    pub dtype: FloatDtype,
    /// The most tokens of a micro-batch that one rank computes.
    pub tokens: u64,
    /// Stages of a pipeline; 1 without one.
    pub n_stages: usize,
    /// The modes that trade time for memory, as recipe keys: the recipe's, or those that `memory: auto` and `micro_batch_size: auto` select.
    pub modes: Map<String, Value>,
    /// The bytes of the phase that needs most.
    pub peak_bytes: u64,
    /// The phase that needs most.
    pub peak_phase: Phase,
    /// True if the run fits; null if the device's bytes are unknown and no other resource is short.
    pub fits: Option<bool>,
    /// The resources that are known to be too small.
    pub short: Vec<Shortage>,
    /// Bytes by category for each phase, the offloaded bytes, and the host RAM.
    #[serde(flatten)]
    pub estimate: Estimate,
    /// The most tokens of a row that fit with this recipe; null if none do, or the device's bytes are unknown.
    pub longest_row: Option<u64>,
    /// If the run does not fit: changes of the recipe, in the order of the time they cost.
    pub advice: Vec<Advice>,
    /// True if ranks divide the experts and the estimate gives each rank the rows of a balanced load.
    pub assumes_balanced_experts: bool,
    /// True if frozen weights are quantized.
    #[serde(skip)]
    has_quantized_base: bool,
}

/// A change of the recipe, with its estimate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// The keys and their values.
    pub set: Map<String, Value>,
    /// The bytes of the phase that needs most.
    pub peak_bytes: u64,
    /// True if the run then fits.
    pub fits: bool,
    /// The resources that are then too small.
    pub short: Vec<Shortage>,
    /// True if the trained weights stay bit-identical.
    pub same_result: bool,
}

impl EstimateReport {
    /// Estimates `setup` and compares it with `capacity`.
    pub fn new(recipe: String, setup: &Setup, capacity: &Capacity) -> Self {
        let estimate = estimate(setup);
        let (frozen, trained) = parameters::counts(setup);
        let short = estimate.shortages(capacity);
        let fits = if short.is_empty() { capacity.bytes.map(|_| true) } else { Some(false) };
        let advice = if fits == Some(false) { advice(setup, capacity) } else { Vec::new() };
        Self {
            format: 1,
            recipe,
            device: capacity.name.clone(),
            device_bytes: capacity.bytes,
            n_parameters: frozen + trained,
            n_active: parameters::active_count(setup),
            n_trained: trained,
            dtype: setup.compute,
            tokens: setup.n_micro_batch_tokens(),
            n_stages: setup.layout.n_stages(),
            modes: setup.modes.keys().into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            peak_bytes: estimate.peak_bytes(),
            peak_phase: estimate.peak().phase,
            fits,
            short,
            longest_row: capacity.bytes.and_then(|_| max_row_tokens(setup, capacity)),
            estimate,
            advice,
            assumes_balanced_experts: assumes_balanced_experts(setup),
            has_quantized_base: setup
                .model
                .base_params()
                .any(|spec| matches!(spec.storage, WeightStorage::Quantized(_))),
        }
    }
}

/// Returns true if ranks receive as many rows as the router sends to their experts.
fn assumes_balanced_experts(setup: &Setup) -> bool {
    let is_divided = setup.ranks.n_expert_ranks() > setup.ranks.expert_tensor;
    is_divided && setup.model.config().moe().is_some()
}

/// Returns the cheapest modes that fit and those that need least memory. Then adds options that change results by
/// rounding: tiled MLPs, moments in bf16, and CPU optimizer offload of a GPU run.
fn advice(setup: &Setup, capacity: &Capacity) -> Vec<Advice> {
    let mut advice = mode_advice(setup, capacity, &[]);
    let (mut setup, mut switches) = (setup.clone(), Vec::new());
    if !setup.modes.tiled_mlp {
        setup.modes.tiled_mlp = true;
        switches.push(("tiled_mlp_compute", json!(true)));
        advice.extend(mode_advice(&setup, capacity, &switches));
    }
    if setup.compute == FloatDtype::Bf16 && setup.moments == FloatDtype::F32 {
        setup.moments = FloatDtype::Bf16;
        switches.push(("deepspeed.bf16.bf16_optimizer_states", json!(true)));
        advice.extend(mode_advice(&setup, capacity, &switches));
    }
    if setup.compute_device == DeviceKind::Gpu && setup.optimizer_on_host < 1.0 {
        setup.optimizer_on_host = 1.0;
        switches.push(("deepspeed.zero_optimization.offload_optimizer", json!({"device": "cpu"})));
        advice.extend(mode_advice(&setup, capacity, &switches));
    }
    advice
}

/// Returns advice for the cheapest modes that fit, then for `full` and `offload`. `setup` already has `switches`.
fn mode_advice(setup: &Setup, capacity: &Capacity, switches: &[(&str, Value)]) -> Vec<Advice> {
    let found = choose(setup, FixedModes::default(), capacity).found.map(|candidate| candidate.modes);
    let most = by_cost(setup, FixedModes::default()).into_iter().filter(|modes| {
        let saves_least = [CheckpointingMode::Full, CheckpointingMode::Offload(1.0)].contains(&modes.activations);
        saves_least && found.is_none_or(|found| found != *modes)
    });
    let to_advice = |modes: Modes| {
        let estimate = estimate(&Setup { modes, ..setup.clone() });
        let short = estimate.shortages(capacity);
        let mut set: Map<String, Value> =
            modes.keys().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        set.extend(switches.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        let (peak_bytes, fits) = (estimate.peak_bytes(), short.is_empty());
        Advice { set, peak_bytes, fits, short, same_result: switches.is_empty() }
    };
    found.into_iter().chain(most).map(to_advice).collect()
}

/// Formats keys and values as `key=value` arguments for the command line: `'key={every: 2}'`.
pub fn as_arguments<'a>(set: impl IntoIterator<Item = (&'a str, &'a Value)>) -> String {
    let pair = |(key, value): (&str, &Value)| match value {
        Value::String(text) => format!("{key}={text}"),
        Value::Object(map) => format!("'{key}={{{}}}'", flow(map)),
        other => format!("{key}={other}"),
    };
    set.into_iter().map(pair).collect::<Vec<_>>().join(" ")
}

fn flow(map: &Map<String, Value>) -> String {
    let plain = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    map.iter().map(|(key, value)| format!("{key}: {}", plain(value))).collect::<Vec<_>>().join(", ")
}

/// Returns the shortages of resources other than the device's memory, which the report covers separately.
fn other_shortages(short: &[Shortage]) -> impl Iterator<Item = &Shortage> {
    short.iter().filter(|shortage| shortage.of != Resource::Device)
}

fn pairs(set: &Map<String, Value>) -> impl Iterator<Item = (&str, &Value)> {
    set.iter().map(|(key, value)| (key.as_str(), value))
}

impl fmt::Display for EstimateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [parameters, trained] = [self.n_parameters, self.n_trained].map(|n| quantity(n as f64));
        let (recipe, tokens, modes) = (&self.recipe, self.tokens, as_arguments(pairs(&self.modes)));
        let active = self.n_active.map(|n| format!(", {} active", quantity(n as f64))).unwrap_or_default();
        writeln!(
            f,
            "memory of {recipe}: {parameters} parameters{active}, {trained} trained, {tokens} tokens a micro-batch"
        )?;
        writeln!(f, "with {modes}")?;
        if self.n_stages > 1 {
            writeln!(
                f,
                "on the ranks of pipeline stage {} of {}, which need most",
                self.estimate.stage, self.n_stages
            )?;
        }
        self.table(f)?;
        if self.estimate.offloaded > 0 {
            writeln!(f, "offloaded activations: {}", format_bytes(self.estimate.offloaded))?;
        }
        if let Some(host) = self.estimate.host {
            writeln!(f, "host RAM: {}", format_bytes(host))?;
        }
        self.write_result(f)
    }
}

impl EstimateReport {
    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phases = &self.estimate.phases;
        let is_used = |category: &Category| phases.iter().any(|phase| phase.breakdown.of(*category) > 0);
        let row = |name: &str, cells: Vec<String>| {
            let cells: String = cells.iter().map(|cell| format!("{cell:>13}")).collect();
            format!("  {name:<22}{cells}")
        };
        writeln!(f, "{}", row("", phases.iter().map(|phase| phase.phase.name().to_owned()).collect()))?;
        for category in Category::ALL.into_iter().filter(is_used) {
            let cell = |n: u64| if n == 0 { "-".to_owned() } else { format_bytes(n) };
            writeln!(
                f,
                "{}",
                row(category.name(), phases.iter().map(|phase| cell(phase.breakdown.of(category))).collect())
            )?;
        }
        let mark = |phase: &Phase| if *phase == self.peak_phase { "*" } else { "" };
        let totals =
            phases.iter().map(|phase| format!("{}{}", mark(&phase.phase), format_bytes(phase.breakdown.total())));
        writeln!(f, "{}", row("total (* is the peak)", totals.collect()))
    }

    fn write_result(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(capacity) = self.device_bytes else {
            return writeln!(f, "the memory of {} is not known", self.device);
        };
        let result = if self.peak_bytes <= capacity { "fits" } else { "does not fit" };
        writeln!(f, "{result}: {} of {} ({})", format_bytes(self.peak_bytes), format_bytes(capacity), self.device)?;
        for shortage in other_shortages(&self.short) {
            writeln!(f, "does not fit: {shortage}")?;
        }
        match self.longest_row {
            Some(tokens) => writeln!(f, "longest row that fits with this recipe: {tokens} tokens")?,
            None => writeln!(f, "no row fits with this recipe")?,
        }
        if self.assumes_balanced_experts {
            writeln!(
                f,
                "assumes balanced experts: the rank with the busiest ones gets up to expert_load.max_over_mean times the rows"
            )?;
        }
        for advice in &self.advice {
            let fits = if advice.fits { "fits" } else { "does not fit" };
            let short: String = other_shortages(&advice.short).map(|shortage| format!(" ({shortage})")).collect();
            let note = if advice.same_result { "" } else { "; changes results by rounding" };
            writeln!(
                f,
                "  {}: {}, {fits}{short}{note}",
                as_arguments(pairs(&advice.set)),
                format_bytes(advice.peak_bytes)
            )?;
        }
        self.write_other_methods(f)
    }

    /// Writes further methods if no recipe key is enough.
    fn write_other_methods(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.advice.is_empty() || self.advice.iter().any(|advice| advice.fits) {
            return Ok(());
        }
        if self.n_trained == self.n_parameters {
            writeln!(f, "  LoRA (`model.peft_config`) needs no gradients and moments for the frozen weights")?;
        }
        if !self.has_quantized_base {
            writeln!(f, "  `model.quantize_base: fp8` stores the frozen weights of a LoRA run in a byte each")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_formatted_as_shell_arguments() {
        let (full, every, on) = (json!("full"), json!({"every": 2}), json!(true));
        let set = [("a.b", &full), ("c", &every), ("d", &on)];
        assert_eq!(as_arguments(set), "a.b=full 'c={every: 2}' d=true");
    }
}
