//! Compares training on a recipe's mesh with training on one rank: two steps of a tiny model, in this process.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{DType, Device, Tensor};
use candlewick_comm::mesh::{Axis, Mesh};
use candlewick_comm::{Collective, Options, World, sum, threads};
use candlewick_model::{AdapterSpec, Config, Model, RouterLoss};
use candlewick_ops::{CuSeqlens, GradPolicy, GradScaler, to_host};
use candlewick_parallel::{
    AuxiliaryLoss, Engine, EngineSpec, LossScale, MasterRounding, Micro, MicroColumns, ParallelGroups, StepLoss,
    mtp_loss_name,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::plan::{PipelinePlan, Plan, RanksPlan};
use crate::recipe::MoeBenchmarkSection;
use crate::run::engine_spec;

/// Maximum relative difference, by the norm of a parameter's update: sums of some hundred f32 terms in different
/// orders.
const TOLERANCE: f64 = 1e-4;
const STEPS: usize = 2;
/// A prime, so that hardly any number of ranks divides it.
const VOCAB: usize = 101;
const HEAD_DIM: usize = 8;
const LEARNING_RATE: f64 = 1.0;

/// The result of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParallelReport {
    /// The mesh.
    pub mesh: String,
    /// The number of ranks.
    pub n_ranks: usize,
    /// The largest relative difference of each class of values from one rank's.
    pub differences: Vec<Difference>,
}

/// The largest difference in one class of values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The class: losses, gradient norms, or updates of a kind of parameter.
    pub class: &'static str,
    /// The difference relative to one rank's value.
    pub relative: f64,
    /// The step or parameter with the largest difference.
    pub at: String,
}

/// The results of two steps.
struct TwoSteps {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// The change of each parameter.
    updates: BTreeMap<String, Vec<f32>>,
}

/// The distribution of the work over ranks.
#[derive(Clone, Copy)]
struct RankLayout<'a> {
    ranks: RanksPlan,
    pipeline: &'a PipelinePlan,
    plan: &'a Plan,
}

impl ParallelReport {
    /// Returns true if all differences are within the tolerance.
    pub fn passes(&self) -> bool {
        self.differences.iter().all(|difference| difference.relative <= TOLERANCE)
    }
}

/// Trains a tiny variant of the plan's model on the plan's mesh, whose ranks are threads, and on one rank.
pub fn verify_parallel(plan: &Plan) -> Result<ParallelReport> {
    verify_wrapped(plan, |group: Arc<dyn Collective>| group)
}

/// Like [`verify_parallel`], with `wrap` applied to the group of all ranks.
fn verify_wrapped(plan: &Plan, wrap: impl WrapGroup) -> Result<ParallelReport> {
    let plan = &comparable(plan);
    let config = plan.model.config.as_ref().context("failed to shrink the model: its config is not known")?;
    let model = Model::new(tiny_config(config, plan)?, plan.model.adapter.clone())?;
    let single_stage = PipelinePlan::alone();
    let single = run(&model, RankLayout { ranks: one_rank(plan), pipeline: &single_stage, plan }, &wrap)?;
    let parallel = run(&model, RankLayout { ranks: plan.ranks, pipeline: &plan.pipeline, plan }, &wrap)?;
    let mut differences = vec![scalar_difference("loss", &parallel.losses, &single.losses)];
    differences.push(scalar_difference("gradient norm", &parallel.norms, &single.norms));
    differences.extend(update_differences(&parallel.updates, &single.updates)?);
    Ok(ParallelReport { mesh: plan.ranks.degrees().to_string(), n_ranks: plan.ranks.n_ranks(), differences })
}

/// Returns the plan without settings whose effect depends on the mesh: FP8, and of routers capacity, noise, forced loads,
/// Sinkhorn balancing and the loss with the selections of all ranks.
fn comparable(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.fp8 = None;
    if let Some(moe) = &mut plan.moe {
        moe.capacity_factor = None;
        moe.pads_to_capacity = false;
        moe.sinkhorn = false;
        moe.losses.retain(|term| term.loss != RouterLoss::GlobalLoadBalancing);
        moe.input_jitter_eps = 0.0;
        moe.benchmark = MoeBenchmarkSection::default();
    }
    plan
}

/// Returns the ranks of a run on one rank.
fn one_rank(plan: &Plan) -> RanksPlan {
    RanksPlan { expert: plan.ranks.expert.map(|_| 1), ..RanksPlan::alone() }
}

/// Returns a tiny config of the same family, with the same number of heads, and with as few layers as the pipeline
/// allows.
fn tiny_config(config: &Config, plan: &Plan) -> Result<Config> {
    let mut json = config.to_json();
    let n_virtual_stages = plan.pipeline.stages * plan.pipeline.chunks;
    let n_layers =
        if plan.pipeline.layers.is_some() { config.n_layers() } else { config.n_layers().min(n_virtual_stages.max(2)) };
    let keys = json.as_object_mut().context("failed to shrink the model: its config is not an object")?;
    let n_heads = config.attention_heads().n_query;
    for (key, value) in [
        ("hidden_size", json!(n_heads * HEAD_DIM)),
        ("head_dim", json!(HEAD_DIM)),
        ("intermediate_size", json!(24 * plan.ranks.tensor)),
        ("num_hidden_layers", json!(n_layers)),
        ("vocab_size", json!(vocab_size(plan.ranks.tensor))),
        ("max_position_embeddings", json!(64)),
        ("initializer_range", json!(0.1)),
        ("rope_scaling", Value::Null),
        ("pad_token_id", Value::Null),
        ("bos_token_id", Value::Null),
        ("eos_token_id", Value::Null),
    ] {
        keys.insert(key.to_owned(), value);
    }
    keys.remove("layer_types");
    Ok(Config::from_json(json)?.with_mtp_layers(config.n_mtp_layers()))
}

/// Returns a vocabulary size such that each of `n_ranks` ranks gets tokens.
fn vocab_size(n_ranks: usize) -> usize {
    VOCAB.max(n_ranks * n_ranks)
}

/// A wrapper of the group of all ranks, from which a rank creates its groups.
trait WrapGroup: Fn(Arc<dyn Collective>) -> Arc<dyn Collective> + Sync {}

impl<F: Fn(Arc<dyn Collective>) -> Arc<dyn Collective> + Sync> WrapGroup for F {}

fn run(model: &Model, layout: RankLayout, wrap: &impl WrapGroup) -> Result<TwoSteps> {
    let options = Options::default();
    let rank = |world: &World| train_rank(&*wrap(world.group()), model, layout);
    let ranks = threads::run(layout.ranks.n_ranks(), options, rank).map_err(|error| anyhow!("failed to {error}"))?;
    ranks.into_iter().next().context("failed to check: there are no ranks")
}

fn train_rank(group: &dyn Collective, model: &Model, layout: RankLayout) -> Result<TwoSteps> {
    let RankLayout { ranks, pipeline, plan } = layout;
    let mesh = Mesh::new(ranks.degrees(), group.size()).map_err(|error| anyhow!("failed to start: {error}"))?;
    let groups = ParallelGroups::new(&mesh, group)?;
    let groups = if ranks.expert.is_some() { groups.with_experts(&mesh, group)? } else { groups };
    let spec = engine_spec(plan, &ranks, pipeline, model.config());
    let engine = EngineSpec { optimizer: spec.optimizer.for_comparison(), ..spec }
        .build(model.clone(), &groups, Device::Cpu)?
        .with_tiled_mlp(plan.model.tiled_mlp())
        .with_label_smoothing(plan.label_smoothing_factor as f32);
    engine.store().fill(|spec| {
        let mut values = vec![0.0; spec.numel()];
        spec.initialise(plan.seed, &mut values);
        if AdapterSpec::owns(&spec.name) || spec.name.ends_with("bias") {
            // Zeros would hide the effect of the other LoRA factor.
            values.iter_mut().enumerate().for_each(|(i, x)| *x = 0.1 * (0.7 * i as f32).sin());
        }
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })?;
    let before = masters(&engine)?;
    let place = |axis| mesh.coordinate(group.rank(), axis);
    let data_rank = place(Axis::DpReplicate) * ranks.dp_shard + place(Axis::DpShard);
    let scaler = GradScaler::new(GradPolicy { max_norm: Some(1.0), ..GradPolicy::NO_CLIP_NO_SCALE }, 0, &Device::Cpu)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        // Enough micro-batches to fill the pipeline of each data-parallel rank. One rank computes all of them.
        let n_micros = plan.ranks.n_data() * plan.pipeline.stages.max(2);
        let own = (0..n_micros).filter(|micro| micro % ranks.n_data() == data_rank);
        let micros = own.map(|micro| micro_batch(step, micro)).collect::<Result<Vec<_>>>()?;
        let n_targets: usize = (0..n_micros).map(|micro| lengths(step, micro).iter().sum::<usize>()).sum();
        let scale = LossScale::mean_over(n_targets as f64);
        engine.store().zero_grads()?;
        let mut auxiliary = plan.moe.as_ref().map(|moe| moe.auxiliary(n_targets)).unwrap_or_default();
        auxiliary.extend((1..=model.config().n_mtp_layers()).map(|depth| AuxiliaryLoss {
            name: mtp_loss_name(depth),
            coefficient: 0.1,
            normalizer: n_targets as f64,
        }));
        let loss = StepLoss { auxiliary: &auxiliary, ..StepLoss::from(&scale) };
        let sums = engine.forward_backward(&micros, loss, |_| 0)?;
        let own =
            sums.micros.iter().map(|sum| Ok(f64::from(to_host(sum)?.to_scalar::<f32>()?))).sum::<Result<f64>>()?;
        losses.push(sum(engine.group(), own)? / n_targets as f64);
        let squares = engine.store().grad_squares()?;
        norms.push(to_host(&squares.sum_all()?)?.to_scalar::<f64>()?.sqrt());
        scaler.update(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?)?;
        engine.store().step(LEARNING_RATE, &scaler, MasterRounding::Nearest)?;
    }
    let mut updates = masters(&engine)?;
    for (after, before) in updates.values_mut().zip(before.values()) {
        after.iter_mut().zip(before).for_each(|(after, before)| *after -= before);
    }
    Ok(TwoSteps { losses, norms, updates })
}

/// Returns the master weights of the trainable parameters.
fn masters(engine: &Engine) -> Result<BTreeMap<String, Vec<f32>>> {
    let mut masters = BTreeMap::new();
    for master in engine.store().masters() {
        let (spec, value) = master?;
        if spec.trainable {
            masters.insert(spec.name.clone(), to_host(&value.flatten_all()?)?.to_vec1()?);
        }
    }
    Ok(masters)
}

/// Returns the lengths of a micro-batch's sequences.
fn lengths(step: usize, micro: usize) -> Vec<usize> {
    (0..3).map(|i| 4 + (step * 7 + micro * 5 + i * 3) % 11).collect()
}

fn micro_batch(step: usize, micro: usize) -> Result<Micro> {
    let lengths = lengths(step, micro);
    let n_tokens: usize = lengths.iter().sum();
    let token = |i: usize| ((step * 31 + micro * 17 + i * i * 13 + i * 7) % VOCAB) as u32;
    let ids: Vec<u32> = (0..n_tokens).map(token).collect();
    let targets: Vec<i64> = (0..n_tokens).map(|i| i64::from(token(i + 1))).collect();
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    Ok(Micro {
        ids: Tensor::new(ids, &Device::Cpu)?,
        targets: Tensor::new(targets, &Device::Cpu)?,
        positions: lengths.iter().flat_map(|length| 0..*length as u32).collect(),
        seqs: CuSeqlens::packed(std::iter::once(0).chain(ends).collect())?,
        padding: Vec::new(),
        columns: MicroColumns::default(),
    })
}

fn scalar_difference(class: &'static str, parallel: &[f64], single: &[f64]) -> Difference {
    let relative = |(a, b): (&f64, &f64)| (a - b).abs() / b.abs();
    let steps = parallel.iter().zip(single).map(relative).enumerate();
    let (step, relative) = steps.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, f64::NAN));
    Difference { class, relative: nan_to_infinity(relative), at: format!("step {}", step + 1) }
}

fn update_differences(
    parallel: &BTreeMap<String, Vec<f32>>,
    single: &BTreeMap<String, Vec<f32>>,
) -> Result<impl Iterator<Item = Difference>> {
    let sizes = |updates: &BTreeMap<String, Vec<f32>>| -> Vec<(String, usize)> {
        updates.iter().map(|(name, values)| (name.clone(), values.len())).collect()
    };
    ensure!(sizes(parallel) == sizes(single), "failed to compare: the ranks have other parameters than one rank");
    let mut largest: BTreeMap<&'static str, Difference> = BTreeMap::new();
    for ((name, a), b) in parallel.iter().zip(single.values()) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
        let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
        let relative = nan_to_infinity(difference / norm(&mut b.iter().map(|b| f64::from(*b))));
        let found = Difference { class: class(name), relative, at: name.clone() };
        match largest.get(found.class) {
            Some(other) if other.relative >= relative => {}
            _ => drop(largest.insert(found.class, found)),
        }
    }
    Ok(largest.into_values())
}

/// Maps NaN to infinity, so that it exceeds every tolerance.
fn nan_to_infinity(relative: f64) -> f64 {
    if relative.is_nan() { f64::INFINITY } else { relative }
}

fn class(name: &str) -> &'static str {
    let classes = [
        ("lora_", "adapters"),
        ("bias", "biases"),
        ("norm", "norms"),
        ("embed_tokens", "embedding"),
        ("lm_head", "output layer"),
        ("self_attn", "attention"),
    ];
    classes.into_iter().find(|(part, _)| name.contains(part)).map_or("mlp", |(_, class)| class)
}

/// Formats a line for each class of values, and the result.
impl fmt::Display for ParallelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ranks ({}) compared with one rank, {STEPS} steps of a tiny model", self.n_ranks, self.mesh)?;
        for Difference { class, relative, at } in &self.differences {
            let mark = if *relative <= TOLERANCE { "" } else { "  DIFFERENT" };
            writeln!(f, "  {class:14} {relative:>9.1e}  {at}{mark}")?;
        }
        let result = if self.passes() { "equal" } else { "not equal" };
        write!(f, "{result}: relative differences up to {TOLERANCE:.0e} are rounding")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use candlewick_comm::{Pending, Recv, Reduce, Result, Solo};

    use super::*;
    use crate::metrics::Console;
    use crate::recipe::Loaded;
    use crate::resolve::{Environment, HubAccess, HubView, WorldInfo};
    use candlewick_text::hub::{Hub, HubSettings};

    /// A group whose all-reduce returns the rank's own values, as do the groups split from it.
    struct LocalReduceGroup(Arc<dyn Collective>);

    impl Collective for LocalReduceGroup {
        fn rank(&self) -> usize {
            self.0.rank()
        }

        fn size(&self) -> usize {
            self.0.size()
        }

        fn check_device(&self, device: &Device) -> Result<()> {
            self.0.check_device(device)
        }

        fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending> {
            Solo.start_all_reduce(x, op)
        }

        fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
            self.0.start_all_gather(x)
        }

        fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
            self.0.start_reduce_scatter(x)
        }

        fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
            self.0.start_all_to_all(x, send, recv)
        }

        fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
            self.0.start_broadcast(x, root)
        }

        fn start_send_recv(
            &self,
            x: Option<&Tensor>,
            to: Option<usize>,
            recv: Option<Recv>,
        ) -> Result<Pending<Option<Tensor>>> {
            self.0.start_send_recv(x, to, recv)
        }

        fn barrier(&self) -> Result<()> {
            self.0.barrier()
        }

        fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
            Ok(Arc::new(Self(self.0.split(name, lists)?)))
        }
    }

    fn plan(arguments: &[&str]) -> Plan {
        plan_of("llama", arguments)
    }

    fn plan_of(model_type: &str, arguments: &[&str]) -> Plan {
        let text = format!(
            "model: {{dtype: f32, config: {{model_type: {model_type}, vocab_size: 64, hidden_size: 16, \
             intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, \
             rms_norm_eps: 1e-5, max_position_embeddings: 128}}}}\ntokenizer: {{name_or_path: tok}}\n\
             data: {{sources: [a.jsonl]}}\n"
        );
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let loaded = Loaded::parse(Path::new("r.yaml"), text, &arguments).unwrap();
        let hub = Hub::new(HubSettings::new("cache")).unwrap();
        let view = HubView { hub: &hub, access: HubAccess::ThisMachine };
        let known = Environment::gather(&loaded, view, Console::Quiet, WorldInfo::first_of(2)).unwrap();
        Plan::resolve(&loaded, &known).unwrap()
    }

    #[test]
    fn a_group_without_reduction_fails() {
        for arguments in [&[][..], &["tensor_parallel_size=2", "sequence_parallel=false"]] {
            let plan = plan(arguments);
            let correct = verify_parallel(&plan).unwrap();
            assert!(correct.passes(), "{correct}");
            let broken = verify_wrapped(&plan, |group: Arc<dyn Collective>| {
                Arc::new(LocalReduceGroup(group)) as Arc<dyn Collective>
            })
            .unwrap();
            assert!(!broken.passes() && broken.to_string().contains("DIFFERENT"), "{broken}");
            assert!(broken.differences.iter().filter(|it| it.relative > TOLERANCE).count() > 3, "{broken}");
        }
    }

    #[test]
    fn a_group_of_a_layer_that_the_tiny_model_lacks_is_no_error() {
        let groups = "optimizer.groups=[{pattern: layers.39, lr: 1e-4}, {pattern: norm, learning_rate_factor: 0.5}]";
        let report = verify_parallel(&plan(&["model.config.num_hidden_layers=40", groups])).unwrap();
        assert!(report.passes(), "{report}");
    }

    #[test]
    fn a_mixture_of_experts_equals_one_rank() {
        let experts = [
            "model.config.num_experts=4",
            "model.config.num_experts_per_tok=2",
            "model.config.moe_intermediate_size=8",
            "moe.z_loss_coeff=0.1",
            "moe.expert_capacity_factor=1",
            "moe.input_jitter_eps=0.1",
        ];
        let (balanced, sinkhorn) = ("moe.aux_loss_coeff=0.1", "moe.router_load_balancing_type=sinkhorn");
        for arguments in [
            &["expert_parallel_size=2", balanced][..],
            &["tensor_parallel_size=2", balanced],
            &["expert_tensor_parallel_size=2", balanced],
            &["expert_parallel_size=2", balanced, "moe.router_load_balancing_type=global_aux_loss"],
            &["tensor_parallel_size=2", sinkhorn],
        ] {
            let report = verify_parallel(&plan_of("qwen3_moe", &[&experts[..], arguments].concat())).unwrap();
            assert!(report.passes(), "{report}");
        }
    }

    #[test]
    fn every_rank_has_tokens_of_the_vocabulary() {
        for n_ranks in 1..=64 {
            let n_tokens = vocab_size(n_ranks);
            assert!((n_ranks - 1) * n_tokens.div_ceil(n_ranks) < n_tokens, "{n_ranks}");
        }
    }
}
