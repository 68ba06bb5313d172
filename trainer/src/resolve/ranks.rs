//! The degrees of parallelism of a run.

use candlewick_model::{Config, LayerSpec, MixerSplit};
use candlewick_ops::{AttentionHeads, AttentionImpl};
use candlewick_text::quantity::counted;

use super::model::ATTENTION;
use super::resolver::{Resolver, degree_advice, one_of};
use super::{backend, deepspeed, moe};
use crate::plan::{ModelPlan, RanksPlan};
use crate::recipe::TokenDispatcherType;

pub(super) const TENSOR: &str = "tensor_parallel_size";
const CONTEXT: &str = "context_parallel_size";
const ULYSSES: &str = "sequence_parallel_size";
const SEQUENCE_PARALLEL: &str = "sequence_parallel";

pub(super) fn resolve(resolver: &mut Resolver, model: &ModelPlan, stages: usize) -> RanksPlan {
    let n_in_stage = resolver.env.world.n_ranks / stages;
    let tensor = tensor(resolver, n_in_stage, model.config.as_ref());
    let given = resolver.recipe().sequence_parallel;
    let sequence_parallel = resolver.pick(SEQUENCE_PARALLEL, given, true);
    if given.is_some() && tensor == 1 {
        resolver.note(format!("{SEQUENCE_PARALLEL} has no effect without tensor_parallel_size"));
    }
    // The other degrees divide the ranks of one tensor-parallel index.
    let n_ranks = n_in_stage / tensor;
    let sequence = sequence(resolver, n_ranks, model.config.as_ref(), tensor);
    let context = context(resolver, n_ranks / sequence, sequence, model.attention.implementation);
    let sharing = context * sequence;
    let zero_stage = deepspeed::zero_stage(resolver);
    let n_shards = match (zero_stage, deepspeed::shard_size(resolver)) {
        (0, given) => {
            if given.is_some() {
                resolver.note(format!("{} has no effect in ZeRO stage 0, which shards nothing", deepspeed::SHARD_SIZE));
            }
            sharing
        }
        (_, None) => n_ranks,
        (_, Some(size)) if n_ranks.is_multiple_of(size) && size.is_multiple_of(sharing) => size,
        (_, Some(size)) => {
            let fits = |n: &usize| n_ranks.is_multiple_of(*n) && n.is_multiple_of(sharing);
            let ranks = counted(n_ranks, "rank");
            let mut message = format!("{}: {ranks} cannot be divided into groups of {size}", deepspeed::SHARD_SIZE);
            if sharing > 1 {
                message += &format!(", each a multiple of the {sharing} ranks that share a sequence");
            }
            resolver.report_with_advice(&[deepspeed::SHARD_SIZE], message, one_of((1..=n_ranks).filter(fits)));
            sharing
        }
    };
    // With one shard ZeRO has no effect, unless the weights are offloaded to the host.
    let zero_stage = if n_shards == 1 && !deepspeed::wants_weights_on_host(resolver) { 0 } else { zero_stage };
    if zero_stage >= 2 && stages > 1 {
        let what = if zero_stage == 3 { "all-gathers weights and reduces gradients" } else { "reduces gradients" };
        resolver.note(format!(
            "ZeRO stage {zero_stage} {what} for every micro-batch of the pipeline; stage 1 does so once a step"
        ));
    }
    if let Some(config) = &model.config {
        let layers = (0..config.n_layers()).map(|layer_idx| config.layer(layer_idx)).collect::<Vec<_>>();
        report_refused_splits(resolver, &layers, [tensor, context, sequence]);
    }
    let experts = moe::expert_ranks(resolver, model, n_in_stage);
    let timeout = resolver.positive("ddp_timeout", resolver.recipe().ddp_timeout, 1800);
    let backend = backend::resolve(resolver);
    let (dp_replicate, dp_shard) = (n_ranks / n_shards, n_shards / sharing);
    let plan = RanksPlan {
        dp_replicate,
        dp_shard,
        context,
        sequence,
        tensor,
        sequence_parallel,
        expert: experts.map(|ranks| ranks.expert),
        expert_tensor: experts.map_or(1, |ranks| ranks.tensor),
        token_dispatcher: experts.map_or_else(TokenDispatcherType::default, |_| moe::token_dispatcher(resolver)),
        stages,
        timeout,
        backend,
        zero_stage,
        reduce_dtype: None,
    };
    RanksPlan { reduce_dtype: deepspeed::reduce_dtype(resolver, plan.n_gradient_ranks()), ..plan }
}

/// Returns the tensor-parallel degree. It must divide the attention heads, the KV heads and the MLP's width.
fn tensor(resolver: &mut Resolver, n_ranks: usize, config: Option<&Config>) -> usize {
    const KEY: &str = TENSOR;
    let given = resolver.recipe().tensor_parallel_size;
    let size = resolver.positive(KEY, given, 1).max(1);
    let divides = |n: &usize| n_ranks.is_multiple_of(*n);
    if !divides(&size) {
        report_indivisible(resolver, KEY, (n_ranks, "rank"), &format!("groups of {size}"));
        return 1;
    }
    let Some(config) = config else { return size };
    let AttentionHeads { n_query, n_kv, .. } = config.attention_heads();
    let (width, vocabulary) = (config.intermediate_size(), config.vocab_size());
    let is_even = |n: &usize| [n_query, n_kv, width].iter().all(|whole| whole.is_multiple_of(*n));
    // The vocabulary is sharded unevenly, but every rank needs at least one token.
    let all_have_tokens = |n: &usize| (n - 1) * vocabulary.div_ceil(*n) < vocabulary;
    let message = if !is_even(&size) {
        format!("{KEY}: {n_query} attention heads, {n_kv} KV heads and an MLP of {width} cannot be divided by {size}")
    } else if !all_have_tokens(&size) {
        let n_tokens = vocabulary.div_ceil(size);
        format!("{KEY}: a vocabulary of {vocabulary} is too small for {size} ranks with {n_tokens} tokens each")
    } else {
        return size;
    };
    let fits = |n: &usize| divides(n) && is_even(n) && all_have_tokens(n);
    resolver.report_with_advice(&[KEY], message, one_of((1..=n_ranks).filter(fits)));
    1
}

/// Returns the Ulysses degree. It must divide each tensor-parallel rank's attention heads. It must divide the KV
/// heads or be a multiple of them.
fn sequence(resolver: &mut Resolver, n_ranks: usize, config: Option<&Config>, tensor: usize) -> usize {
    let given = resolver.recipe().sequence_parallel_size;
    let size = resolver.positive(ULYSSES, given, 1).max(1);
    if !n_ranks.is_multiple_of(size) {
        report_indivisible(resolver, ULYSSES, (n_ranks, "rank"), &format!("groups of {size}"));
        return 1;
    }
    let Some(AttentionHeads { n_query, n_kv, .. }) = config.map(Config::attention_heads) else { return size };
    let (n_query, n_kv) = (n_query / tensor, n_kv / tensor);
    let fits = |n: &usize| n_query.is_multiple_of(*n) && (n_kv.is_multiple_of(*n) || n.is_multiple_of(n_kv));
    if !fits(&size) {
        let message = format!("{ULYSSES}: {n_query} attention heads with {n_kv} KV heads cannot be divided by {size}");
        let possible = (1..=n_ranks).filter(|n| n_ranks.is_multiple_of(*n)).filter(fits);
        resolver.report_with_advice(&[ULYSSES], message, one_of(possible));
    }
    size
}

/// Returns the context-parallel degree: the size of a ring among `n_groups` groups of `sequence` ranks.
fn context(resolver: &mut Resolver, n_groups: usize, sequence: usize, attention: AttentionImpl) -> usize {
    const KEY: &str = CONTEXT;
    let given = resolver.recipe().context_parallel_size;
    let size = resolver.positive(KEY, given, 1).max(1);
    if !n_groups.is_multiple_of(size) {
        let unit = if sequence == 1 { "rank".to_owned() } else { format!("group of {sequence} ranks") };
        report_indivisible(resolver, KEY, (n_groups, &unit), &format!("rings of {size}"));
        return 1;
    }
    if size > 1 && matches!(attention, AttentionImpl::Cudnn | AttentionImpl::Reference) {
        let message = format!("{KEY}: {attention} attention does not support chunks of the keys");
        resolver.report_with_advice(&[ATTENTION, KEY], message, format!("use {ATTENTION}: auto or fused"));
    }
    size
}

/// Reports the ways of splitting that the mixer of a layer does not support, given the tensor, context and Ulysses degrees.
fn report_refused_splits(resolver: &mut Resolver, layers: &[LayerSpec], [tensor, context, ulysses]: [usize; 3]) {
    let splits = [
        (TENSOR, MixerSplit::Tensor, tensor),
        (CONTEXT, MixerSplit::Context, context),
        (ULYSSES, MixerSplit::Ulysses, ulysses),
    ];
    for (key, split, n_ranks) in splits {
        if let Some(message) = layers.iter().find_map(|layer| layer.refusal(split, n_ranks)) {
            resolver.report_with_advice(&[key], format!("{key}: {message}"), "use 1");
        }
    }
}

/// Reports that `n` of `unit` (a noun with an optional attribute) cannot be divided into `into`.
pub(super) fn report_indivisible(resolver: &mut Resolver, key: &str, (n, unit): (usize, &str), into: &str) {
    let (word, attribute) = unit.split_at(unit.find(' ').unwrap_or(unit.len()));
    let message = match n {
        1 => format!("{key}: 1 {unit} cannot be divided into {into}"),
        _ => format!("{key}: {n} {word}s{attribute} cannot be divided into {into}"),
    };
    let advice = degree_advice(resolver, (1..=n).filter(|possible| n.is_multiple_of(*possible)));
    resolver.report_with_advice(&[key], message, advice);
}
