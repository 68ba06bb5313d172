//! The data and the batches.

use std::path::{Path, PathBuf};

use super::masking::{self, Masking};
use super::resolver::Resolver;
use super::{mixture, sources, streaming, tokenize_kwargs};
use crate::data::{
    DataKind, DataPlan, Horizon, Packing, PackingStrategy, Padding, RowOrder, Truncation, UnrenderedMessages,
    default_cache_dir,
};
use crate::plan::{ModelPlan, TokenizerPlan};
use crate::recipe::{DataType, MicroBatchSize, Origin, PadTo};

pub(super) fn resolve(
    resolver: &mut Resolver,
    kind: DataKind,
    data_ranks: usize,
    model: &ModelPlan,
    tokenizer: &TokenizerPlan,
) -> DataPlan {
    let recipe = resolver.recipe();
    let data = &recipe.data;
    let (sources, eval_sources, eval_fraction) = sources::resolve(resolver, kind);
    let mixture = mixture::resolve(resolver, sources.len());
    let mixture_key = mixture::key(resolver, &mixture);
    let Masking { masking_strategy, roles_to_train, train_on_eos } = masking::resolve(resolver);
    let max_length = max_length(resolver, model);
    let packing = packing(resolver, kind);
    let truncation = truncation(resolver, kind, packing);
    let order = resolver.pick("data.order", data.order, RowOrder::Shuffle);
    let (micro_batch_size, gradient_accumulation_steps) = batch(resolver);
    DataPlan {
        kind,
        sources,
        eval_sources,
        eval_fraction,
        max_length,
        truncation,
        packing,
        fuse_positions_prob: fuse_positions(resolver, packing),
        padding: padding(resolver, max_length),
        drop_last: resolver.pick("data.drop_last", data.drop_last, false),
        order,
        mixture,
        masking_strategy,
        roles_to_train,
        train_on_eos,
        ignore_empty_think: resolver.pick("data.ignore_empty_think", data.ignore_empty_think, false),
        train_on_empty_answers: resolver.pick("data.train_on_empty_answers", data.train_on_empty_answers, false),
        unrendered_messages: resolver.pick(
            "data.unrendered_messages",
            data.unrendered_messages,
            UnrenderedMessages::Error,
        ),
        add_bos_token: add_bos_token(resolver),
        add_eos_token: resolver.pick("data.add_eos_token", data.add_eos_token, true),
        micro_batch_size,
        gradient_accumulation_steps,
        data_ranks,
        min_iterations: resolver.count("min_iterations", recipe.min_iterations, 0),
        horizon: horizon(resolver),
        overfit_first_batch: resolver.pick("overfit_first_batch", recipe.overfit_first_batch, false),
        seed: resolver.count("data.seed", data.seed, 42) as u64,
        cache_dir: cache_dir(resolver),
        fail_on_missing_cache: resolver.pick("data.fail_on_missing_cache", data.fail_on_missing_cache, false),
        num_proc: num_proc(resolver),
        max_text_tokens: tokenize_kwargs::resolve(resolver, kind),
        repeat_to_pack_max_length: repeat_to_pack(resolver, packing, mixture_key.as_deref()),
        dl_num_workers: dl_num_workers(resolver),
        streaming: streaming::resolve(resolver, mixture_key.as_deref()),
        template_kwargs: tokenizer.chat_template_kwargs.clone(),
    }
}

pub(super) fn resolve_kind(resolver: &mut Resolver) -> DataKind {
    let recipe = resolver.recipe();
    let kind = resolver.pick("type", recipe.kind, DataType::Sft);
    if recipe.data.kind.is_some_and(|data_kind| data_kind != kind) {
        let advice = "remove data.type: it follows from type";
        resolver.report_with_advice(&["data.type"], "data.type differs from the run's type", advice);
    }
    match kind {
        DataType::Causal => DataKind::Causal,
        DataType::Sft => DataKind::Sft,
    }
}

fn max_length(resolver: &mut Resolver, model: &ModelPlan) -> usize {
    const KEY: &str = "data.max_length";
    let given = resolver.recipe().data.max_length;
    let limit = model.config.as_ref().map(candlewick_model::Config::max_positions);
    match (given, limit) {
        (Some(given), Some(limit)) if given.0 > limit => resolver.note(beyond_context(given.0, limit)),
        (Some(given), _) if given.0 < 2 => {
            resolver.report(
                &[KEY],
                format!("{KEY}: expected at least 2, found {}: the first token predicts the second", given.0),
            );
        }
        _ => {}
    }
    match (given, limit) {
        (Some(given), _) => resolver.pick(KEY, Some(given.0), 0),
        (None, Some(limit)) => resolver.record(KEY, limit, Origin::Derived),
        (None, None) => {
            // Only `check` has no config here: a run downloads it first.
            resolver.record(KEY, "the model's max_position_embeddings", Origin::Derived);
            resolver.note(format!(
                "{KEY} will be the model's max_position_embeddings: its config.json is not downloaded yet"
            ));
            0
        }
    }
}

/// Returns the note about rows that are longer than the model's context.
fn beyond_context(max_length: usize, limit: usize) -> String {
    let factor = max_length.div_ceil(limit);
    format!(
        "data.max_length: {max_length} exceeds the model's max_position_embeddings, {limit}: the model was not trained on \
         such positions. YaRN extends the context: model.hf_config_kwargs: {{max_position_embeddings: {max_length}, \
         rope_scaling: {{rope_type: yarn, factor: {factor}, original_max_position_embeddings: {limit}}}}}"
    )
}

fn packing(resolver: &mut Resolver, kind: DataKind) -> Packing {
    let data = &resolver.recipe().data;
    let pack = resolver.pick("data.pack_samples", data.pack_samples, kind == DataKind::Causal);
    let exact = resolver.pick("data.always_max_length", data.always_max_length, kind == DataKind::Causal && pack);
    let strategy = packing_strategy(resolver, pack && !exact);
    match (pack, exact) {
        (false, true) => {
            let message = "data.always_max_length needs data.pack_samples: true";
            resolver.report(&["data.always_max_length"], message);
            Packing::Off
        }
        (false, false) => Packing::Off,
        (true, false) => Packing::Fit(strategy),
        (true, true) => Packing::Exact,
    }
}

fn packing_strategy(resolver: &mut Resolver, packs_whole_samples: bool) -> PackingStrategy {
    const KEY: &str = "data.packing_strategy";
    let given = resolver.recipe().data.packing_strategy;
    if given.is_some() && !packs_whole_samples {
        resolver.note(format!("{KEY} has no effect: it is the order in which data.pack_samples packs whole samples"));
    }
    let default = PackingStrategy::BestFit;
    if packs_whole_samples { resolver.pick(KEY, given, default) } else { given.unwrap_or(default) }
}

fn truncation(resolver: &mut Resolver, kind: DataKind, packing: Packing) -> Truncation {
    let data = &resolver.recipe().data;
    let given = data.truncation;
    if let (Some(given), Some(filter)) = (given, data.filter_samples)
        && (given == Truncation::Drop) != filter
    {
        let message = "data.filter_samples contradicts data.truncation";
        resolver.report_with_advice(
            &["data.filter_samples"],
            message,
            "keep data.truncation; `filter_samples: true` is `truncation: drop`",
        );
    }
    if packing == Packing::Exact {
        if given.is_some_and(|given| given != Truncation::Split) {
            let message = "data.truncation: packing into rows of exactly max_length splits samples of any length";
            resolver.report_with_advice(
                &["data.truncation"],
                message,
                "remove the key, or set data.pack_samples: false",
            );
        }
        return resolver.record("data.truncation", Truncation::Split, Origin::Derived);
    }
    if data.filter_samples == Some(false) {
        resolver.note("data.filter_samples: false has no effect: data.truncation handles long samples");
    }
    let filtered = (data.filter_samples == Some(true)).then_some(Truncation::Drop);
    let origin = match (given, filtered) {
        (Some(_), _) => resolver.loaded.origin(&["data.truncation"]),
        (None, Some(_)) => resolver.loaded.origin(&["data.filter_samples"]),
        (None, None) => Origin::Default,
    };
    let default = match kind {
        DataKind::Sft if resolver.is_arctic_training() && data.filter_samples.is_none() => Truncation::Drop,
        DataKind::Sft => Truncation::Error,
        DataKind::Causal => Truncation::Split,
    };
    resolver.record("data.truncation", given.or(filtered).unwrap_or(default), origin)
}

fn cache_dir(resolver: &mut Resolver) -> PathBuf {
    const KEY: &str = "data.cache_dir";
    let given = resolver.recipe().data.cache_dir.clone();
    let Some(given) = given else {
        let folder = default_cache_dir();
        let home = std::env::var_os("HOME").map(PathBuf::from);
        let below_home = home.and_then(|home| folder.strip_prefix(home).ok().map(|rest| Path::new("~").join(rest)));
        resolver.record(KEY, below_home.unwrap_or_else(|| folder.clone()), Origin::Default);
        return folder;
    };
    PathBuf::from(resolver.pick(KEY, Some(given), String::new()))
}

/// Returns the setting of BOS; `None` is the tokenizer's setting.
fn add_bos_token(resolver: &mut Resolver) -> Option<bool> {
    const KEY: &str = "data.add_bos_token";
    let given = resolver.recipe().data.add_bos_token;
    match given {
        Some(_) => resolver.pick(KEY, given, false),
        None => {
            resolver.record(KEY, "as the tokenizer", Origin::Default);
            return None;
        }
    };
    given
}

fn fuse_positions(resolver: &mut Resolver, packing: Packing) -> f64 {
    const KEY: &str = "data.fuse_positions_prob";
    let given = resolver.recipe().data.fuse_positions_prob;
    let probability = resolver.number(KEY, given, 0.0, 0.0, 1.0);
    if probability > 0.0 && packing == Packing::Off {
        resolver.report(&[KEY], format!("{KEY} needs data.pack_samples: true"));
    }
    probability
}

fn padding(resolver: &mut Resolver, max_length: usize) -> Padding {
    let data = &resolver.recipe().data;
    let given = data.pad_to.or(data.div_length.map(|_| PadTo::DivLength));
    let pad_to = resolver.pick("data.pad_to", data.pad_to, given.unwrap_or(PadTo::None));
    let div_length = match (pad_to, data.div_length) {
        (PadTo::DivLength, given) => resolver.positive("data.div_length", given, 256),
        (_, Some(given)) => resolver.positive("data.div_length", Some(given), 256),
        (_, None) => 1,
    };
    match pad_to {
        PadTo::None if data.div_length.is_some() => {
            resolver.report(&["data.div_length"], "data.div_length contradicts data.pad_to: none");
            Padding::Nothing
        }
        PadTo::None => Padding::Nothing,
        PadTo::DivLength => Padding::Multiple(div_length),
        PadTo::MaxLength => {
            if div_length > 0 && !max_length.is_multiple_of(div_length) {
                let lower = max_length / div_length * div_length;
                let message =
                    format!("data.pad_to: max_length {max_length} is not a multiple of div_length {div_length}");
                let advice = format!("remove data.div_length, or use max_length {lower} or {}", lower + div_length);
                resolver.report_with_advice(&["data.pad_to"], message, advice);
            }
            Padding::MaxLength
        }
    }
}

fn batch(resolver: &mut Resolver) -> (usize, usize) {
    let recipe = resolver.recipe();
    let accumulation_key = "gradient_accumulation_steps";
    let given = match recipe.micro_batch_size {
        // One row until the memory is known: the number of rows of a step is final.
        Some(MicroBatchSize::Auto) => {
            resolver.record("micro_batch_size", "auto", resolver.loaded.origin(&["micro_batch_size"]));
            return (1, resolver.positive(accumulation_key, recipe.gradient_accumulation_steps, 1));
        }
        Some(MicroBatchSize::Rows(rows)) => Some(rows),
        None => None,
    };
    let micro_batch_size = resolver.positive("micro_batch_size", given, 1);
    let accumulation = resolver.positive(accumulation_key, recipe.gradient_accumulation_steps, 1);
    (micro_batch_size, accumulation)
}

/// Returns the end of training. `train_iters` or `train_tokens` replaces `epochs`.
fn horizon(resolver: &mut Resolver) -> Horizon {
    let recipe = resolver.recipe();
    let tokens = recipe.train_tokens.map_or(0, |tokens| resolver.count("train_tokens", Some(tokens), 0));
    if tokens > 0 {
        if recipe.train_iters.is_some_and(|steps| steps.0 > 0) {
            let message = "train_tokens and train_iters exclude each other";
            resolver.report_with_advice(&["train_tokens"], message, "keep one of them");
        }
        if recipe.epochs.is_some() {
            resolver.note("epochs is replaced by train_tokens");
        }
        return Horizon::Tokens(tokens);
    }
    let steps = resolver.count("train_iters", recipe.train_iters, 0);
    if recipe.train_iters.is_some() && steps == 0 {
        resolver.note("train_iters: 0 has no effect: epochs decides");
    }
    if steps > 0 {
        if recipe.epochs.is_some() {
            resolver.note("epochs is replaced by train_iters");
        }
        return Horizon::Steps(steps);
    }
    epochs(resolver)
}

fn epochs(resolver: &mut Resolver) -> Horizon {
    const KEY: &str = "epochs";
    let given = resolver.recipe().epochs.map(|epochs| epochs.0);
    let epochs = given.unwrap_or(1.0);
    match epochs.fract() {
        0.0 => _ = resolver.pick(KEY, given.map(|epochs| epochs as usize), 1),
        _ => _ = resolver.pick(KEY, given, 1.0),
    }
    if epochs == 0.0 {
        resolver.report(&[KEY], "epochs: 0 without train_iters trains nothing");
    } else if !(0.0..=1e9).contains(&epochs) {
        resolver.report(&[KEY], format!("epochs: expected a number above 0 and at most 1e9, found {epochs}"));
    }
    Horizon::Epochs(epochs)
}

fn repeat_to_pack(resolver: &mut Resolver, packing: Packing, mixture_key: Option<&str>) -> bool {
    const KEY: &str = "data.repeat_to_pack_max_length";
    let repeats = resolver.pick(KEY, resolver.recipe().data.repeat_to_pack_max_length, false);
    if repeats && packing == Packing::Off {
        resolver.report(&[KEY], format!("{KEY} needs data.pack_samples: true"));
    }
    if let (true, Some(key)) = (repeats, mixture_key) {
        let message = format!("{KEY}: not possible with {key}, which decides how often a source is read");
        resolver.report_with_advice(&[KEY], message, "remove one of the keys");
    }
    repeats
}

/// Returns the number of data loader workers. A worker prepares two steps ahead, as in PyTorch.
fn dl_num_workers(resolver: &mut Resolver) -> usize {
    const KEY: &str = "data.dl_num_workers";
    const MOST: usize = 64;
    let data = &resolver.recipe().data;
    let default = match (resolver.is_arctic_training(), data.streaming) {
        (true, _) => 2,
        (false, Some(true)) => 1,
        (false, _) => 0,
    };
    let n_workers = resolver.count(KEY, data.dl_num_workers, default);
    if n_workers > MOST {
        resolver.report(&[KEY], format!("{KEY}: expected at most {MOST}, found {n_workers}"));
    }
    n_workers
}

fn num_proc(resolver: &mut Resolver) -> usize {
    let data = &resolver.recipe().data;
    let most = resolver.env.n_cores.max(1);
    resolver.positive("data.num_proc", data.num_proc, most.min(16)).min(most)
}
