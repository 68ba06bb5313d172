//! The training loss, the optimizer and the learning rate schedule.

use candlewick_ops::LossScaling;

use super::deepspeed;
use super::optimizer_groups::{check_rounding, declaration, resolve_group, resolve_kind};
use super::resolver::Resolver;
use crate::data::{DataPlan, Horizon};
use crate::plan::{ModelPlan, OptimizerKindPlan, OptimizerPlan, WeightInit};
use crate::recipe::{
    FloatDtype, HumanFloat, OptimizerType, Origin, SchedulerKwargs, SchedulerName, SchedulerSection, SchedulerType,
};
use crate::schedule::{Floor, PhaseLength, Ramp, Schedule, Shape};

const LR: &str = "optimizer.learning_rate";
const KWARGS: &str = "scheduler.scheduler_specific_kwargs";

pub(super) fn label_smoothing_factor(resolver: &mut Resolver) -> f64 {
    const KEY: &str = "label_smoothing_factor";
    let factor = resolver.pick(KEY, resolver.recipe().label_smoothing_factor.map(|factor| factor.0), 0.0);
    if !(0.0..1.0).contains(&factor) {
        resolver.report(&[KEY], format!("{KEY}: expected at least 0 and below 1, found {factor}"));
    }
    factor
}

/// The default learning rate and weight decay.
struct RateDefaults {
    learning_rate: f64,
    weight_decay: f64,
}

impl RateDefaults {
    /// ArcticTraining's, which suit training from scratch.
    const ARCTIC_TRAINING: Self = Self { learning_rate: 5e-4, weight_decay: 0.1 };
    /// The values of TRL's SFTTrainer. torchtune's full fine-tuning has the same rate.
    const PRETRAINED: Self = Self { learning_rate: 2e-5, weight_decay: 0.0 };
    /// Ten times the rate of full fine-tuning, as TRL advises, and the rate of the QLoRA paper.
    const ADAPTER: Self = Self { learning_rate: 2e-4, weight_decay: 0.0 };

    fn of(resolver: &Resolver, model: &ModelPlan) -> Self {
        match model.init {
            _ if resolver.is_arctic_training() => Self::ARCTIC_TRAINING,
            WeightInit::Random => Self::ARCTIC_TRAINING,
            WeightInit::Load if model.adapter.is_some() => Self::ADAPTER,
            WeightInit::Load => Self::PRETRAINED,
        }
    }
}

pub(super) fn resolve(resolver: &mut Resolver, model: &ModelPlan) -> OptimizerPlan {
    let dtype = model.dtype;
    let defaults = RateDefaults::of(resolver, model);
    let optimizer = &resolver.recipe().optimizer;
    let kind = resolver.pick("optimizer.type", optimizer.kind, OptimizerType::FusedAdam);
    if matches!(kind, OptimizerType::CpuAdam | OptimizerType::CpuAdamMoe) {
        resolver.note(
            "optimizer.type: the states of AdamW are on the device of the weights; to offload them to host memory set \
             deepspeed.zero_optimization.offload_optimizer: {device: cpu}",
        );
    }
    let origin = resolver.loaded.origin(&[LR, "optimizer.lr"]);
    let learning_rate = resolver.record(LR, optimizer.learning_rate.map_or(defaults.learning_rate, |lr| lr.0), origin);
    if learning_rate <= 0.0 {
        resolver.report(&[LR, "optimizer.lr"], format!("{LR}: expected above 0, found {learning_rate}"));
    }
    let decay = optimizer.weight_decay;
    let weight_decay = resolver.number("optimizer.weight_decay", decay, defaults.weight_decay, 0.0, f64::MAX);
    let kind = resolve_kind(resolver, "optimizer", declaration(kind), (optimizer, &[]));
    let groups = optimizer.groups.iter().enumerate();
    let groups = groups.map(|(i, group)| resolve_group(resolver, (i, group), (learning_rate, &kind))).collect();
    let gradient_clipping = gradient_clipping(resolver);
    let (masters, moments) = deepspeed::bf16_states(resolver, dtype);
    let loss_scaling = match dtype {
        FloatDtype::F16 => deepspeed::loss_scaling(resolver),
        FloatDtype::Bf16 | FloatDtype::F32 => LossScaling::NONE,
    };
    let bf16_stochastic_round = bf16_stochastic_round(resolver, masters);
    let optimizer = OptimizerPlan {
        learning_rate,
        weight_decay,
        kind: OptimizerKindPlan(kind.build()),
        groups,
        gradient_clipping,
        masters,
        moments,
        bf16_stochastic_round,
        loss_scaling,
    };
    check_rounding(resolver, &optimizer);
    optimizer
}

fn bf16_stochastic_round(resolver: &mut Resolver, masters: FloatDtype) -> bool {
    const KEY: &str = "optimizer.bf16_stochastic_round";
    let is_on = resolver.pick(KEY, resolver.recipe().optimizer.bf16_stochastic_round, false);
    if is_on && masters != FloatDtype::Bf16 {
        let message = format!("{KEY}: true needs master weights in bf16");
        let advice = "set deepspeed.bf16.bf16_master_weights_and_grads: true, or remove the key";
        resolver.report_with_advice(&[KEY], message, advice);
    }
    is_on
}

/// Adds a note to a recipe in ArcticTraining's dialect that its default learning rate suits training from scratch.
pub(super) fn note_default_rate(resolver: &mut Resolver, model: &ModelPlan) {
    let is_open = resolver.recipe().optimizer.learning_rate.is_none() && resolver.is_arctic_training();
    if !is_open || model.init == WeightInit::Random {
        return;
    }
    let usual = if model.adapter.is_some() { "1e-4 to 2e-4 for LoRA" } else { "1e-5 to 2e-5 for all weights" };
    resolver.note(format!(
        "{LR} is not set: 5e-4, ArcticTraining's default, is high for a pretrained model; usual: {usual}"
    ));
}

fn gradient_clipping(resolver: &mut Resolver) -> Option<f64> {
    const KEYS: [&str; 2] = ["gradient_clipping", "deepspeed.gradient_clipping"];
    let own = resolver.recipe().gradient_clipping.map(|norm| norm.0);
    let deepspeed = deepspeed::gradient_clipping(resolver);
    if let (Some(own), Some(other)) = (own, deepspeed)
        && own != other
    {
        let message = format!("{} is {other}, but {} is {own}", KEYS[1], KEYS[0]);
        resolver.report_with_advice(&[KEYS[1]], message, "keep one of them");
    }
    let origin = resolver.loaded.origin(&KEYS);
    let norm = resolver.record(KEYS[0], own.or(deepspeed).unwrap_or(1.0), origin);
    if norm < 0.0 {
        resolver.report(&KEYS, format!("{}: expected at least 0, found {norm}", KEYS[0]));
    }
    (norm > 0.0).then_some(norm)
}

pub(super) fn resolve_schedule(resolver: &mut Resolver) -> Schedule {
    let scheduler = &resolver.recipe().scheduler;
    if scheduler.learning_rate.is_some() {
        let keys = ["scheduler.learning_rate", "scheduler.lr"];
        resolver.report_with_advice(&keys, "scheduler.learning_rate has moved", format!("set {LR}"));
    }
    let name = name(resolver);
    refuse_other_schedules_kwargs(resolver, name);
    let warmup = warmup(resolver, name);
    let shape = shape(resolver, name);
    if let Ok(serde_json::Value::Object(mut numbers)) = serde_json::to_value(shape) {
        numbers.remove("name");
        if !numbers.is_empty() {
            let own = ["scheduler.num_decay_steps", "scheduler.num_decay_tokens", "scheduler.min_lr_ratio"];
            let origin = resolver.loaded.origin(&[&[KWARGS][..], &own[..]].concat());
            resolver.record(KWARGS, numbers, origin);
        }
    }
    Schedule { warmup, shape }
}

fn name(resolver: &mut Resolver) -> SchedulerName {
    let scheduler = &resolver.recipe().scheduler;
    let is_wsd = scheduler.kind == Some(SchedulerType::Wsd);
    if is_wsd && scheduler.name.is_some_and(|name| name != SchedulerName::WarmupStableDecay) {
        resolver.report(&["scheduler.name"], "scheduler.name contradicts scheduler.type: wsd");
    }
    let default = if is_wsd { SchedulerName::WarmupStableDecay } else { SchedulerName::Linear };
    resolver.pick("scheduler.name", scheduler.name, default)
}

fn warmup(resolver: &mut Resolver, name: SchedulerName) -> PhaseLength {
    const TOKENS: &str = "scheduler.warmup_tokens";
    const KEYS: [&str; 4] = ["scheduler.warmup_steps", "scheduler.num_warmup_steps", "scheduler.warmup_ratio", TOKENS];
    let SchedulerSection { warmup_ratio, warmup_steps, warmup_tokens, .. } = resolver.recipe().scheduler;
    let some = warmup_ratio.is_some_and(|ratio| ratio.0 != 0.0)
        || [warmup_steps, warmup_tokens].into_iter().flatten().any(|length| length.0 != 0);
    if name == SchedulerName::Constant {
        if some {
            resolver.report_with_advice(&KEYS, "scheduler.name: constant has no warm-up", "use constant_with_warmup");
        }
        return PhaseLength::Steps(0);
    }
    match (warmup_steps, warmup_tokens, warmup_ratio) {
        (Some(_), None, Some(_)) => {
            resolver.report(&KEYS, "scheduler.warmup_steps and scheduler.warmup_ratio exclude each other");
            PhaseLength::Steps(0)
        }
        (Some(_), Some(_), _) | (_, Some(_), Some(_)) => {
            let message = "scheduler.warmup_tokens excludes scheduler.warmup_steps and scheduler.warmup_ratio";
            resolver.report(&[TOKENS], message);
            PhaseLength::Steps(0)
        }
        (Some(steps), None, None) => {
            let origin = resolver.loaded.origin(&KEYS);
            PhaseLength::Steps(resolver.record(KEYS[0], steps.0, origin))
        }
        (None, Some(tokens), None) => PhaseLength::Tokens(resolver.pick(TOKENS, Some(tokens.0), 0)),
        (None, None, ratio) => PhaseLength::Ratio(resolver.number(KEYS[2], ratio, 0.1, 0.0, 1.0)),
    }
}

/// Refuses arguments of other schedules, which would be ignored.
fn refuse_other_schedules_kwargs(resolver: &mut Resolver, name: SchedulerName) {
    use SchedulerName::*;
    let own: &[&str] = match name {
        Constant | ConstantWithWarmup | Linear => &[],
        Cosine | CosineWithRestarts => &["num_cycles"],
        CosineWithMinLr => &["num_cycles", "min_lr", "min_lr_rate"],
        WarmupStableDecay => &[
            "num_cycles",
            "num_stable_steps",
            "num_decay_steps",
            "decay_ratio",
            "min_lr_ratio",
            "warmup_type",
            "decay_type",
        ],
        InverseSqrt => &["timescale"],
        Polynomial => &["lr_end", "power"],
    };
    let scheduler = &resolver.recipe().scheduler;
    let kwargs = serde_json::to_value(&scheduler.scheduler_specific_kwargs).unwrap_or_default();
    let given = kwargs.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let others: Vec<String> = given.map(|(key, _)| key.clone()).filter(|key| !own.contains(&key.as_str())).collect();
    for key in others {
        let path = format!("{KWARGS}.{key}");
        let advice = match own {
            [] => "this schedule has no further arguments".to_owned(),
            own => format!("its arguments: {}", own.join(", ")),
        };
        resolver.report_with_advice(&[&path], format!("{path} is not an argument of this schedule"), advice);
    }
    for (key, given) in [
        ("num_decay_steps", scheduler.num_decay_steps.is_some()),
        ("num_decay_tokens", scheduler.num_decay_tokens.is_some()),
        ("min_lr_ratio", scheduler.min_lr_ratio.is_some()),
    ] {
        if given && name != WarmupStableDecay {
            let path = format!("scheduler.{key}");
            resolver.report(&[&path], format!("{path} belongs to the warmup_stable_decay schedule"));
        }
    }
}

fn shape(resolver: &mut Resolver, name: SchedulerName) -> Shape {
    let scheduler = &resolver.recipe().scheduler;
    let kwargs = &scheduler.scheduler_specific_kwargs;
    let float = |given: Option<HumanFloat>, default: f64| given.map_or(default, |x| x.0);
    match name {
        SchedulerName::Constant | SchedulerName::ConstantWithWarmup => Shape::Constant,
        SchedulerName::Linear => Shape::Linear,
        SchedulerName::Cosine => Shape::Cosine { num_cycles: float(kwargs.num_cycles, 0.5) },
        SchedulerName::CosineWithRestarts => {
            let num_cycles = float(kwargs.num_cycles, 1.0);
            if num_cycles < 1.0 || num_cycles.fract() != 0.0 {
                let key = format!("{KWARGS}.num_cycles");
                resolver.report(&[&key], format!("{key}: expected a whole number of at least 1, found {num_cycles}"));
            }
            Shape::CosineWithRestarts { num_cycles: num_cycles as usize }
        }
        SchedulerName::CosineWithMinLr => {
            Shape::CosineWithMinLr { num_cycles: float(kwargs.num_cycles, 0.5), floor: floor(resolver, kwargs) }
        }
        SchedulerName::WarmupStableDecay => wsd(resolver, scheduler),
        SchedulerName::InverseSqrt => Shape::InverseSqrt { timescale: kwargs.timescale.map(|n| n.0) },
        SchedulerName::Polynomial => {
            Shape::Polynomial { lr_end: float(kwargs.lr_end, 1e-7), power: float(kwargs.power, 1.0) }
        }
    }
}

fn floor(resolver: &mut Resolver, kwargs: &SchedulerKwargs) -> Floor {
    match (kwargs.min_lr, kwargs.min_lr_rate) {
        (Some(min_lr), None) => Floor::MinLr(min_lr.0),
        (None, Some(rate)) => Floor::MinLrRate(rate.0),
        _ => {
            let message = "cosine_with_min_lr: set one of scheduler_specific_kwargs.min_lr and .min_lr_rate";
            resolver.report(&[KWARGS, "scheduler.name"], message);
            Floor::MinLrRate(0.0)
        }
    }
}

fn wsd(resolver: &mut Resolver, scheduler: &SchedulerSection) -> Shape {
    let kwargs = &scheduler.scheduler_specific_kwargs;
    let both = [
        ("num_decay_steps", kwargs.num_decay_steps.is_some() && scheduler.num_decay_steps.is_some()),
        ("min_lr_ratio", kwargs.min_lr_ratio.is_some() && scheduler.min_lr_ratio.is_some()),
    ];
    for (key, _) in both.into_iter().filter(|(_, is_twice)| *is_twice) {
        let path = format!("scheduler.{key}");
        resolver.report(&[&path], format!("{path} and {KWARGS}.{key} are the same argument; keep one of them"));
    }
    let steps = kwargs.num_decay_steps.or(scheduler.num_decay_steps);
    let decay = match (steps, kwargs.decay_ratio, scheduler.num_decay_tokens) {
        (Some(steps), None, None) => PhaseLength::Steps(steps.0),
        (None, Some(ratio), None) => PhaseLength::Ratio(ratio.0),
        (None, None, Some(tokens)) => PhaseLength::Tokens(tokens.0),
        _ => {
            let message = "warmup_stable_decay: set one of scheduler_specific_kwargs.num_decay_steps and .decay_ratio, \
                           or scheduler.num_decay_tokens";
            resolver.report(&[KWARGS, "scheduler.name", "scheduler.type"], message);
            PhaseLength::Steps(0)
        }
    };
    Shape::WarmupStableDecay {
        stable: kwargs.num_stable_steps.map(|n| PhaseLength::Steps(n.0)),
        decay,
        warmup_type: kwargs.warmup_type.unwrap_or(Ramp::Linear),
        decay_type: kwargs.decay_type.unwrap_or(Ramp::Cosine),
        min_lr_ratio: kwargs.min_lr_ratio.or(scheduler.min_lr_ratio).map_or(0.0, |x| x.0),
        num_cycles: kwargs.num_cycles.map_or(0.5, |x| x.0),
    }
}

/// Checks the schedule against the number of steps, if that is known before the data are counted.
pub(super) fn check_known_horizon(
    resolver: &mut Resolver,
    data: &DataPlan,
    optimizer: &OptimizerPlan,
    schedule: &Schedule,
) {
    let Horizon::Steps(total_steps) = data.horizon else { return };
    if optimizer.learning_rate <= 0.0 || schedule.has_tokens() {
        return;
    }
    if let Err(error) = schedule.check(total_steps, optimizer.learning_rate) {
        resolver.report(&["scheduler"], format!("scheduler: failed to {error}"));
    }
    if let PhaseLength::Steps(steps) = schedule.warmup
        && steps > 0
    {
        resolver.record("warmup", format!("{steps} of {total_steps} steps"), Origin::Derived);
    }
}
