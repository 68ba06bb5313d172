//! Prefix sharing and KV caches: the results equal those of a forward of each sequence alone.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candlewick_comm::Solo;
use candlewick_model::checkpoint::Checkpoint;
use candlewick_model::{Config, LengthClass, Model, ParamSpec};
use candlewick_ops::CuSeqlens;
use candlewick_parallel::{
    ActivationCheckpointing, AppendTokens, Engine, KvCache, KvCachePool, Micro, MicroColumns, ParamDtypes, ParamStore,
    Prefix, PrefixKvCache, ScoreQuery, ShardingGroups, StoreMode, TokenRun,
};
use serde_json::{Value, json};

const VOCAB: u32 = 50;
const WINDOW: usize = 9;

/// Scaling of RoPE.
#[derive(Clone, Copy)]
enum Scaling {
    Default,
    Yarn,
    /// LongRoPE with an original context that all sequences exceed, but not all of their parts.
    LongRope,
    /// LongRoPE with a larger original context.
    LongRopeOf(usize),
}

impl Scaling {
    fn keys(self) -> Value {
        let factors = |growth: f64| (0..8).map(|pair| 1.0 + growth * f64::from(pair)).collect::<Vec<_>>();
        match self {
            Self::Default => Value::Null,
            Self::Yarn => json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
            Self::LongRope => Self::LongRopeOf(10).keys(),
            Self::LongRopeOf(original) => json!({
                "rope_type": "longrope", "original_max_position_embeddings": original,
                "short_factor": factors(0.1), "long_factor": factors(2.0),
            }),
        }
    }
}

fn engine(dtype: DType, window: Option<usize>, scaling: Scaling) -> Engine {
    let config = json!({
        "architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": false, "initializer_range": 0.2,
        "sliding_window": window, "rope_scaling": scaling.keys()
    });
    with_weights(Config::from_json(config).unwrap(), dtype, |spec| {
        let mut values = vec![0f32; spec.numel()];
        spec.initialise(3, &mut values);
        Tensor::from_vec(values, spec.shape.as_slice(), &Device::Cpu)
    })
}

fn with_weights(
    config: Config,
    dtype: DType,
    weights: impl FnMut(&ParamSpec) -> candle_core::Result<Tensor>,
) -> Engine {
    let model = Model::new(config, None).unwrap();
    let dtypes = ParamDtypes::computing_in(dtype);
    let store = ParamStore::new(&model, dtypes, StoreMode::Infer, &Device::Cpu, ShardingGroups::single_rank()).unwrap();
    store.fill(weights).unwrap();
    let plan = vec![ActivationCheckpointing::None; model.n_blocks()];
    Engine::new(model, store, plan, Arc::new(Solo), Device::Cpu)
}

fn text(len: usize, seed: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 31 + seed * 17 + i * i * (seed + 3)) % VOCAB as usize) as u32).collect()
}

/// Returns the log-probability of every token of a sequence but the first, by a forward of it alone.
fn alone(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    let mut targets: Vec<i64> = ids[1..].iter().map(|&id| i64::from(id)).collect();
    targets.push(Micro::IGNORED);
    let micro = Micro {
        ids: Tensor::new(ids, &Device::Cpu).unwrap(),
        targets: Tensor::new(targets, &Device::Cpu).unwrap(),
        positions: (0..ids.len() as u32).collect(),
        seqs: CuSeqlens::packed(vec![0, ids.len()]).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    };
    let losses = engine.token_losses(&micro).unwrap();
    losses[..ids.len() - 1].iter().map(|loss| -loss).collect()
}

/// One batch: token runs with their prefixes, and the prefix to keep cached after the batch.
type Batch<'a> = (Vec<(Prefix, &'a [u32])>, Prefix);

/// Length of all sequences, or one of their class.
const LONGEST: usize = 200;

/// Scores all but the first token of every run, batch by batch; returns a list per run.
fn scores(engine: &Engine, batches: &[Batch]) -> Vec<Vec<f32>> {
    let mut path = PrefixKvCache::new(engine.model().n_blocks());
    let mut all = Vec::new();
    for (runs, kept) in batches {
        let class = engine.model().length_class(LONGEST);
        let runs: Vec<TokenRun> = runs.iter().map(|&(prefix, ids)| TokenRun { prefix, ids, class }).collect();
        let (mut queries, mut first) = (Vec::new(), 0);
        for run in &runs {
            let next = run.ids.iter().enumerate().skip(1);
            queries.extend(next.map(|(i, &id)| ScoreQuery { row: (first + i - 1) as u32, id }));
            first += run.ids.len();
        }
        let branches = path.plan_batch(&runs, *kept, &Device::Cpu).unwrap();
        let scores = engine.token_scores(branches.tokens(), &queries, &branches).unwrap();
        let mut scores = scores.logprobs.into_iter();
        all.extend(runs.iter().map(|run| scores.by_ref().take(run.ids.len() - 1).collect::<Vec<_>>()));
    }
    all
}

#[track_caller]
fn assert_near(ours: &[f32], want: &[f32], bound: f32) {
    assert_eq!(ours.len(), want.len());
    for (i, (a, b)) in ours.iter().zip(want).enumerate() {
        assert!((a - b).abs() <= bound, "{i}: {a} {b}");
    }
}

/// A prefix, two continuations of it, a continuation of the second, and an unrelated sequence.
fn tree() -> [Vec<u32>; 5] {
    [text(150, 1), text(7, 2), text(20, 3), text(3, 4), text(11, 5)]
}

#[track_caller]
fn check_tree(dtype: DType, window: Option<usize>, scaling: Scaling, bound: f32) {
    let engine = engine(dtype, window, scaling);
    let [trunk, first, second, third, stranger] = &tree();
    let start = Prefix::Cached(0);
    let whole = [(
        vec![
            (start, &trunk[..]),
            (Prefix::Run(0), first),
            (Prefix::Run(0), second),
            (Prefix::Run(2), third),
            (start, stranger),
        ],
        start,
    )];
    let in_one = scores(&engine, &whole);
    // The shared prefix in two runs, and every run in a batch of its own.
    let bit_by_bit = [
        (vec![(start, &trunk[..100])], Prefix::Run(0)),
        (vec![(Prefix::Cached(100), &trunk[100..])], Prefix::Run(0)),
        (vec![(Prefix::Cached(150), first)], Prefix::Cached(150)),
        (vec![(start, stranger), (Prefix::Cached(150), second)], Prefix::Run(1)),
        (vec![(Prefix::Cached(170), third)], Prefix::Cached(170)),
        (vec![(Prefix::Cached(170), third)], start),
    ];
    let in_many = scores(&engine, &bit_by_bit);
    for (run, parts) in [(1, [2].as_slice()), (2, &[4]), (3, &[5]), (3, &[6]), (4, &[3])] {
        assert_eq!(in_one[run], parts.iter().flat_map(|i| in_many[*i].clone()).collect::<Vec<_>>(), "run {run}");
    }
    for (path, run) in [(vec![trunk], 0), (vec![trunk, first], 1), (vec![trunk, second, third], 3), (vec![stranger], 4)]
    {
        let ids = path.into_iter().flatten().copied().collect::<Vec<_>>();
        let want = alone(&engine, &ids);
        assert_near(&in_one[run], &want[want.len() - in_one[run].len()..], bound);
    }
}

#[test]
fn branches_of_a_prefix_tree_score_as_whole_sequences() {
    check_tree(DType::F32, None, Scaling::Default, 2e-5);
    check_tree(DType::F32, None, Scaling::Yarn, 2e-5);
    check_tree(DType::F32, None, Scaling::LongRope, 2e-5);
    check_tree(DType::F32, Some(WINDOW), Scaling::Default, 2e-5);
    check_tree(DType::BF16, None, Scaling::Default, 0.1);
}

#[test]
fn a_prefix_that_is_not_cached_is_an_error() {
    let mut path = PrefixKvCache::new(1);
    let mut refused = |prefix| {
        let run = TokenRun { prefix, ids: &[1], class: LengthClass::Short };
        path.plan_batch(&[run], Prefix::Cached(0), &Device::Cpu).err().unwrap().to_string()
    };
    assert!(refused(Prefix::Cached(3)).contains("a prefix of 3 cached tokens: 0 are cached"));
    assert!(refused(Prefix::Run(0)).contains("continue run 0: the batch has 0 runs before"));
}

/// Returns the logits after each sequence of a forward.
fn append(engine: &Engine, pool: &KvCachePool, sequences: &[(usize, usize, &[u32])]) -> Vec<Vec<f32>> {
    let class = engine.model().length_class(LONGEST);
    let growth =
        |&(start, n_seen, ids): &(usize, usize, &[u32])| AppendTokens { start, n_seen, ids: ids.to_vec(), class };
    append_all(engine, pool, &sequences.iter().map(growth).collect::<Vec<_>>())
}

fn append_all(engine: &Engine, pool: &KvCachePool, sequences: &[AppendTokens]) -> Vec<Vec<f32>> {
    let growing = pool.append(sequences).unwrap();
    engine.logits(growing.tokens(), growing.last_rows(), &growing).unwrap().to_vec2().unwrap()
}

/// Returns the logits after a sequence, by a forward of it alone.
fn logits_alone(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    let mut path = PrefixKvCache::new(engine.model().n_blocks());
    let run = TokenRun { prefix: Prefix::Cached(0), ids, class: engine.model().length_class(LONGEST) };
    let branches = path.plan_batch(&[run], Prefix::Cached(0), &Device::Cpu).unwrap();
    engine.logits(branches.tokens(), &[ids.len() as u32 - 1], &branches).unwrap().to_vec2().unwrap().remove(0)
}

#[track_caller]
fn check_pool(dtype: DType, window: Option<usize>, scaling: Scaling, bound: f32) {
    let engine = engine(dtype, window, scaling);
    let [a, b, c] = [text(40, 1), text(33, 2), text(150, 3)];
    let pool = KvCachePool::new(engine.model().n_blocks(), 400);
    // b before a in the pool, with rows between them that are free.
    let first = append(&engine, &pool, &[(100, 0, &a[..30]), (10, 0, &b[..20])]);
    assert_near(&first[0], &logits_alone(&engine, &a[..30]), bound);
    assert_near(&first[1], &logits_alone(&engine, &b[..20]), bound);
    // One continues, another starts in part of the gap between, and the third waits.
    let second = append(&engine, &pool, &[(200, 0, &c[..140]), (100, 30, &a[30..31])]);
    assert_near(&second[0], &logits_alone(&engine, &c[..140]), bound);
    assert_near(&second[1], &logits_alone(&engine, &a[..31]), bound);
    // A copy continues like the original.
    pool.copy(10..30, 60).unwrap();
    let third = append(&engine, &pool, &[(60, 20, &b[20..]), (10, 20, &b[20..]), (200, 140, &c[140..])]);
    assert_eq!(third[0], third[1]);
    assert_near(&third[0], &logits_alone(&engine, &b), bound);
    assert_near(&third[2], &logits_alone(&engine, &c), bound);
    // A token in a batch of its own gets equal bits.
    let among = append(&engine, &pool, &[(60, 33, &[7]), (100, 31, &[8]), (10, 33, &[7])]);
    let by_itself = append(&engine, &pool, &[(60, 33, &[7])]);
    assert_eq!(among[0], by_itself[0]);
    assert_eq!(among[0], among[2]);
}

#[test]
fn pooled_sequences_give_the_logits_of_each_alone() {
    check_pool(DType::F32, None, Scaling::Default, 2e-5);
    check_pool(DType::F32, None, Scaling::Yarn, 2e-5);
    check_pool(DType::F32, None, Scaling::LongRope, 2e-5);
    check_pool(DType::F32, Some(WINDOW), Scaling::Default, 2e-5);
    check_pool(DType::BF16, None, Scaling::Default, 0.1);
}

/// Returns the log-probability of `id` in logits.
fn logprob(logits: &[f32], id: u32) -> f32 {
    logits[id as usize] - logits.iter().map(|logit| logit.exp()).sum::<f32>().ln()
}

/// Sequences within and beyond LongRoPE's original context, which begin with the same tokens.
#[test]
fn a_forward_of_short_and_long_sequences_gives_each_its_own_frequencies() {
    let engine = engine(DType::F32, None, Scaling::LongRopeOf(40));
    let lengths = [30, 40, 41, 150];
    let whole = text(150, 1);
    let of = |n: usize| (&whole[..n], engine.model().length_class(n));
    let want = lengths.map(|n| alone(&engine, of(n).0));
    assert!((want[1][20] - want[2][20]).abs() > 1e-3, "the classes differ");

    // Runs of a prefix tree.
    let runs = lengths.map(|n| TokenRun { prefix: Prefix::Cached(0), ids: of(n).0, class: of(n).1 });
    let (mut queries, mut first) = (Vec::new(), 0);
    for n in lengths {
        queries.extend((1..n).map(|i| ScoreQuery { row: (first + i - 1) as u32, id: whole[i] }));
        first += n;
    }
    let mut path = PrefixKvCache::new(engine.model().n_blocks());
    let branches = path.plan_batch(&runs, Prefix::Cached(0), &Device::Cpu).unwrap();
    let scores = engine.token_scores(branches.tokens(), &queries, &branches).unwrap().logprobs;
    assert_near(&scores, &want.concat(), 2e-5);

    // Rows of a pool: prompts, then a token of each.
    let pool = KvCachePool::new(engine.model().n_blocks(), 400);
    let part = |at: usize, n_seen: usize, n: usize| {
        let (ids, class) = of(lengths[at]);
        AppendTokens { start: [300, 0, 100, 150][at], n_seen, ids: ids[n_seen..n].to_vec(), class }
    };
    for (n_left_before, n_left) in [(usize::MAX, 2), (2, 1)] {
        let parts: Vec<AppendTokens> =
            (0..4).map(|at| part(at, lengths[at].saturating_sub(n_left_before), lengths[at] - n_left)).collect();
        for (at, logits) in append_all(&engine, &pool, &parts).iter().enumerate() {
            let next = lengths[at] - n_left;
            assert_near(&[logprob(logits, whole[next])], &want[at][next - 1..next], 2e-5);
        }
    }
}

/// Logits of tests/reference/rope.py: transformers computed each sequence alone. 16 is the original context.
#[test]
fn cached_sequences_within_and_beyond_the_original_context_have_the_logits_of_transformers() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures");
    let reference = candle_core::safetensors::load(fixtures.join("rope.safetensors"), &Device::Cpu).unwrap();
    let cases: Value = serde_json::from_slice(&std::fs::read(fixtures.join("rope.json")).unwrap()).unwrap();
    let ids = reference["ids"].to_dtype(DType::U32).unwrap().to_vec1::<u32>().unwrap();
    let (long, short) = ids.split_at(reference["lengths"].to_vec1::<i64>().unwrap()[0] as usize);
    assert!(long.len() > 16 && short.len() < 16);
    for (name, overrides) in cases["overrides"].as_object().unwrap() {
        let mut config = Config::read(&fixtures.join("llama3")).unwrap();
        config.apply_overrides(overrides.as_object().unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&fixtures.join("llama3")).unwrap();
        let engine = with_weights(config, DType::F32, |spec| {
            checkpoint.param(spec, DType::F32, &Device::Cpu).map_err(candle_core::Error::wrap)
        });
        let want = reference[&format!("{name}.logits")].to_vec2::<f32>().unwrap();
        let check = |logits: &[Vec<f32>], rows: &[usize]| {
            for (logits, row) in logits.iter().zip(rows) {
                let norm = |x: &[f32]| x.iter().map(|x| x * x).sum::<f32>().sqrt();
                let difference: Vec<f32> = logits.iter().zip(&want[*row]).map(|(a, b)| a - b).collect();
                assert!(norm(&difference) < 1e-5 * norm(&want[*row]), "{name}, row {row}: {logits:?} {:?}", want[*row]);
            }
        };
        let [of_long, of_short] = [long, short].map(|ids| engine.model().length_class(ids.len()));

        let runs = [(long, of_long), (short, of_short)];
        let runs = runs.map(|(ids, class)| TokenRun { prefix: Prefix::Cached(0), ids, class });
        let rows: Vec<usize> = (0..ids.len()).collect();
        let mut path = PrefixKvCache::new(engine.model().n_blocks());
        let batch = path.plan_batch(&runs, Prefix::Cached(0), &Device::Cpu).unwrap();
        let queried: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        check(&engine.logits(batch.tokens(), &queried, &batch).unwrap().to_vec2().unwrap(), &rows);

        let pool = KvCachePool::new(engine.model().n_blocks(), 64);
        for (n_seen, n_left) in [(0, 6), (6, 1), (1, 0)] {
            let part = |ids: &[u32], start, class| {
                let n_seen = if n_seen == 0 { 0 } else { ids.len() - n_seen };
                AppendTokens { start, n_seen, ids: ids[n_seen..ids.len() - n_left].to_vec(), class }
            };
            let logits = append_all(&engine, &pool, &[part(long, 20, of_long), part(short, 3, of_short)]);
            check(&logits, &[long.len() - n_left - 1, ids.len() - n_left - 1]);
        }
        let cache = KvCache::new(engine.model().n_blocks(), short.len());
        for (i, id) in short.iter().enumerate() {
            let logits = engine.next_logits(&[*id], i, of_short, &cache).unwrap().to_vec1().unwrap();
            check(&[logits], &[long.len() + i]);
        }
    }
}
