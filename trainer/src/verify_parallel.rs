//! A comparison of a recipe's mesh with one rank: two steps of a shrunken model, both ways, in this process.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{DType, Device, Tensor};
use candlewick_comm::mesh::{Axis, Mesh};
use candlewick_comm::{Collective, Options, World, sum, threads};
use candlewick_model::{AdapterSpec, Config, Model};
use candlewick_ops::{AdamW, CuSeqlens, GradPolicy, GradScaler, to_host};
use candlewick_parallel::{Engine, LossScale, Micro, ParallelGroups};
use serde::Serialize;
use serde_json::{Value, json};

use crate::plan::{PipelinePlan, Plan, RanksPlan};
use crate::run::engine_spec;

/// Relative to the norm of a parameter's update: f32 sums of some hundred terms in another order.
const TOLERANCE: f64 = 1e-4;
const STEPS: usize = 2;
/// Hardly any number of ranks gets even parts of it.
const VOCAB: usize = 101;
const HEAD_DIM: usize = 8;
/// So large an eps makes a step follow the gradient, not its sign: rounding of a small one stays small.
const HYPER: AdamW = AdamW { lr: 1.0, beta1: 0.9, beta2: 0.99, eps: 1.0, weight_decay: 0.0 };

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The mesh.
    pub mesh: String,
    /// How many ranks it has.
    pub n_ranks: usize,
    /// The largest relative difference of each kind of number from one rank's, and where it is.
    pub differences: Vec<Difference>,
}

/// The largest difference among numbers of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The kind: losses, gradient norms, or updates of a kind of parameter.
    pub class: &'static str,
    /// Relative to one rank's.
    pub relative: f64,
    /// The step or parameter with the largest.
    pub at: String,
}

/// What two steps came to.
struct Outcome {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// The change of each parameter.
    updates: BTreeMap<String, Vec<f32>>,
}

/// Who shares the work how.
#[derive(Clone, Copy)]
struct Way<'a> {
    ranks: RanksPlan,
    pipeline: &'a PipelinePlan,
    plan: &'a Plan,
}

impl Report {
    /// Tells whether all differences are roundings.
    pub fn passes(&self) -> bool {
        self.differences.iter().all(|difference| difference.relative <= TOLERANCE)
    }
}

/// Trains the shrunken model of `plan` on the plan's mesh, whose ranks are threads, and on one rank.
pub fn verify_parallel(plan: &Plan) -> Result<Report> {
    verify_over(plan, |group: Arc<dyn Collective>| group)
}

/// The same, with `over` between this and the group of all ranks.
fn verify_over(plan: &Plan, over: impl Over) -> Result<Report> {
    let config = plan.model.config.as_ref().context("failed to shrink the model: its config is not known")?;
    let model = Model::new(shrunken(config, plan)?, plan.model.adapter.clone())?;
    let alone = PipelinePlan::alone();
    let one = run(&model, Way { ranks: RanksPlan::alone(), pipeline: &alone, plan }, &over)?;
    let ours = run(&model, Way { ranks: plan.ranks, pipeline: &plan.pipeline, plan }, &over)?;
    let mut differences = vec![of_numbers("loss", &ours.losses, &one.losses)];
    differences.push(of_numbers("gradient norm", &ours.norms, &one.norms));
    differences.extend(of_updates(&ours.updates, &one.updates)?);
    Ok(Report { mesh: plan.ranks.degrees().to_string(), n_ranks: plan.ranks.n_ranks(), differences })
}

/// The same kind of model with as many heads, and as few blocks as the pipeline takes.
fn shrunken(config: &Config, plan: &Plan) -> Result<Config> {
    let mut json = config.to_json();
    let n_runs = plan.pipeline.stages * plan.pipeline.chunks;
    let n_layers =
        if plan.pipeline.layers.is_some() { config.n_layers() } else { config.n_layers().min(n_runs.max(2)) };
    let keys = json.as_object_mut().context("failed to shrink the model: its config is no object")?;
    let n_heads = config.attention_heads().n_query;
    for (key, value) in [
        ("hidden_size", json!(n_heads * HEAD_DIM)),
        ("head_dim", json!(HEAD_DIM)),
        ("intermediate_size", json!(24 * plan.ranks.tensor)),
        ("num_hidden_layers", json!(n_layers)),
        ("vocab_size", json!(vocabulary(plan.ranks.tensor))),
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
    Ok(Config::from_json(json)?)
}

/// So many tokens that each of `n_ranks` gets some.
fn vocabulary(n_ranks: usize) -> usize {
    VOCAB.max(n_ranks * n_ranks)
}

/// What a rank makes its groups of, of the group of all ranks.
trait Over: Fn(Arc<dyn Collective>) -> Arc<dyn Collective> + Sync {}

impl<F: Fn(Arc<dyn Collective>) -> Arc<dyn Collective> + Sync> Over for F {}

fn run(model: &Model, way: Way, over: &impl Over) -> Result<Outcome> {
    let options = Options::default();
    let rank = |world: &World| of_rank(&*over(world.group()), model, way);
    let ranks = threads::run(way.ranks.n_ranks(), options, rank).map_err(|error| anyhow!("failed to {error}"))?;
    ranks.into_iter().next().context("failed to check: there are no ranks")
}

fn of_rank(everyone: &dyn Collective, model: &Model, way: Way) -> Result<Outcome> {
    let Way { ranks, pipeline, plan } = way;
    let mesh = Mesh::new(ranks.degrees(), everyone.size()).map_err(|error| anyhow!("failed to start: {error}"))?;
    let groups = ParallelGroups::new(&mesh, everyone)?;
    let engine = engine_spec(plan, &ranks, pipeline, model.config())
        .build(model.clone(), &groups, Device::Cpu)?
        .with_tiled_mlp(plan.model.tiled_mlp());
    engine.store().fill(|spec| {
        let mut values = vec![0.0; spec.numel()];
        spec.initialise(plan.seed, &mut values);
        if AdapterSpec::owns(&spec.name) || spec.name.ends_with("bias") {
            // Zeros would hide what the other factor does.
            values.iter_mut().enumerate().for_each(|(i, x)| *x = 0.1 * (0.7 * i as f32).sin());
        }
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })?;
    let before = masters(&engine)?;
    let place = |axis| mesh.coordinate(everyone.rank(), axis);
    let seat = place(Axis::DpReplicate) * ranks.dp_shard + place(Axis::DpShard);
    let scaler = GradScaler::new(GradPolicy { max_norm: Some(1.0), ..GradPolicy::NO_CLIP_NO_SCALE }, 0, &Device::Cpu)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        // As many micro-batches as fill a pipeline, for each rank with its own; one rank computes all of them.
        let n_micros = plan.ranks.n_data() * plan.pipeline.stages.max(2);
        let own = (0..n_micros).filter(|micro| micro % ranks.n_data() == seat);
        let micros = own.map(|micro| micro_batch(step, micro)).collect::<Result<Vec<_>>>()?;
        let n_targets: usize = (0..n_micros).map(|micro| lengths(step, micro).iter().sum::<usize>()).sum();
        let scale = LossScale::mean_over(n_targets as f64);
        engine.store().zero_grads()?;
        let sums = engine.forward_backward(&micros, &scale, |_| 0)?;
        let own =
            sums.micros.iter().map(|sum| Ok(f64::from(to_host(sum)?.to_scalar::<f32>()?))).sum::<Result<f64>>()?;
        losses.push(sum(engine.group(), own)? / n_targets as f64);
        let squares = engine.store().grad_squares()?;
        norms.push(to_host(&squares.sum_all()?)?.to_scalar::<f64>()?.sqrt());
        scaler.update(&squares, &Tensor::zeros(1, DType::F32, &Device::Cpu)?, [HYPER.beta1, HYPER.beta2])?;
        engine.store().step(&HYPER, &scaler)?;
    }
    let mut updates = masters(&engine)?;
    for (after, before) in updates.values_mut().zip(before.values()) {
        after.iter_mut().zip(before).for_each(|(after, before)| *after -= before);
    }
    Ok(Outcome { losses, norms, updates })
}

/// The trained parameters.
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

/// The lengths of a micro-batch's sequences.
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
    })
}

fn of_numbers(class: &'static str, ours: &[f64], one: &[f64]) -> Difference {
    let relative = |(a, b): (&f64, &f64)| (a - b).abs() / b.abs();
    let steps = ours.iter().zip(one).map(relative).enumerate();
    let (step, relative) = steps.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, f64::NAN));
    Difference { class, relative: or_infinite(relative), at: format!("step {}", step + 1) }
}

fn of_updates(
    ours: &BTreeMap<String, Vec<f32>>,
    one: &BTreeMap<String, Vec<f32>>,
) -> Result<impl Iterator<Item = Difference>> {
    ensure!(ours.keys().eq(one.keys()), "failed to compare: the ranks have other parameters than one rank");
    let mut largest: BTreeMap<&'static str, Difference> = BTreeMap::new();
    for ((name, a), b) in ours.iter().zip(one.values()) {
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
        let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
        let relative = or_infinite(difference / norm(&mut b.iter().map(|b| f64::from(*b))));
        let found = Difference { class: class(name), relative, at: name.clone() };
        match largest.get(found.class) {
            Some(other) if other.relative >= relative => {}
            _ => drop(largest.insert(found.class, found)),
        }
    }
    Ok(largest.into_values())
}

/// What is not a number is close to none.
fn or_infinite(relative: f64) -> f64 {
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

/// A line for each kind of number, and the verdict.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} ranks ({}) beside one, {STEPS} steps of a shrunken model", self.n_ranks, self.mesh)?;
        for Difference { class, relative, at } in &self.differences {
            let mark = if *relative <= TOLERANCE { "" } else { "  DIFFERENT" };
            writeln!(f, "  {class:14} {relative:>9.1e}  {at}{mark}")?;
        }
        let verdict = if self.passes() { "the same" } else { "not the same" };
        write!(f, "{verdict}: relative to one rank's, at most {TOLERANCE:.0e} is rounding")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use candlewick_comm::{Pending, Recv, Reduce, Result, Solo};

    use super::*;
    use crate::metrics::Console;
    use crate::plan::{HubAccess, Known, WorldInfo};
    use crate::recipe::Loaded;

    /// A group that sums without asking anybody, as all that are made of it do.
    struct Deaf(Arc<dyn Collective>);

    impl Collective for Deaf {
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
        let text = "model: {dtype: f32, config: {model_type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, \
                    num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, rms_norm_eps: 1e-5, \
                    max_position_embeddings: 128}}\ntokenizer: {name_or_path: tok}\ndata: {sources: [a.jsonl]}\n";
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let loaded = Loaded::parse(Path::new("r.yaml"), text.to_owned(), &arguments).unwrap();
        let known = Known::gather(&loaded, HubAccess::ThisMachine, Console::Quiet, WorldInfo::first_of(2)).unwrap();
        Plan::resolve(&loaded, &known).unwrap()
    }

    #[test]
    fn a_group_that_lies_does_not_pass() {
        for arguments in [&[][..], &["tensor_parallel_size=2", "sequence_parallel=false"]] {
            let plan = plan(arguments);
            let honest = verify_parallel(&plan).unwrap();
            assert!(honest.passes(), "{honest}");
            let lied =
                verify_over(&plan, |group: Arc<dyn Collective>| Arc::new(Deaf(group)) as Arc<dyn Collective>).unwrap();
            assert!(!lied.passes() && lied.to_string().contains("DIFFERENT"), "{lied}");
            assert!(lied.differences.iter().filter(|it| it.relative > TOLERANCE).count() > 3, "{lied}");
        }
    }

    #[test]
    fn each_of_many_ranks_has_some_tokens() {
        for n_ranks in 1..=64 {
            let n_tokens = vocabulary(n_ranks);
            assert!((n_ranks - 1) * n_tokens.div_ceil(n_ranks) < n_tokens, "{n_ranks}");
        }
    }
}
