//! Peak memory of the ops, measured by a counting allocator, each test in a process of its own.

use std::process::Command;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    AttentionChoice, AttentionSpec, CrossEntropy, CuSeqlens, ExpertAssignment, Fp8Config, Fp8Formats, Fp8Layers,
    Fp8Module, Fp8Recipe, Fp8Rounding, GradSink, LossGrad, OutputDtype, Reduction, RouterSpec, SavedOutputs, ScaleRule,
    Tape, TokensPerCall, Weight, attention, grouped_linear, linear, linear_cross_entropy, permute, permute_weights,
    rms_norm, route, saved_by_readers_only, swiglu, swiglu_joined, tiled, unpermute, weighted_swiglu,
};
use peak_alloc::PeakAlloc;

use crate::moe::router::SPEC;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;

/// Environment variable of a child process that runs one test.
const CHILD: &str = "CANDLEWICK_OPS_MEMORY_TEST";

/// Runs a test of this module in a process of its own, because the allocator's counters cover the whole process. It has two
/// threads on each machine, because each thread keeps buffers.
///
/// Returns true in the parent, after the child has passed, and false in the child, which then runs the test.
#[track_caller]
fn passed_in_own_process(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return false;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child
        .args(["--exact", &format!("memory::{test}")])
        .env(CHILD, "1")
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() && stdout.contains("1 passed"), "{test}: {}\n{stdout}{stderr}", output.status);
    true
}

/// Allocates the buffers that each thread keeps.
fn warm() {
    rayon::broadcast(|_| {
        let square = zeros((2, 2), DType::F32);
        linear(&square, &Weight::frozen(square.clone()), None, OutputDtype::SameAsInput).unwrap();
    });
}

/// Returns the peak of allocated bytes during `run`, above the bytes allocated before.
fn peak(run: impl Fn()) -> usize {
    // The first run allocates the scratch buffers of the matmul.
    warm();
    run();
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    run();
    ALLOCATOR.peak_usage() - before
}

/// Returns the bytes that a tape holds, including its output.
fn held(inputs: &[&Tensor], op: impl Fn() -> Result<Tensor>) -> usize {
    held_by(|| Tape::record(inputs, &op).unwrap())
}

/// Returns the bytes that a recorded tape holds.
fn held_by(record: impl Fn() -> Tape) -> usize {
    warm();
    drop(record());
    let before = ALLOCATOR.current_usage();
    let tape = record();
    let held = ALLOCATOR.current_usage() - before;
    drop(tape);
    held
}

fn forth_and_back(inputs: &[&Tensor], op: impl FnOnce() -> Result<Tensor>) {
    let tape = Tape::record(inputs, op).unwrap();
    let dy = tape.output().clone();
    tape.backward(&dy).unwrap();
}

fn zeros(shape: (usize, usize), dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

#[test]
fn attention_is_linear_in_length() {
    if passed_in_own_process("attention_is_linear_in_length") {
        return;
    }
    let of = |t: usize| {
        let x = || Tensor::zeros((t, 2, 16), DType::F32, &Device::Cpu).unwrap();
        let (q, k, v) = (x(), x(), x());
        let spec = AttentionSpec { scale: 0.25, causal: true, window: None, choice: AttentionChoice::default() };
        let seqs = CuSeqlens::packed(vec![0, t]).unwrap();
        peak(|| {
            forth_and_back(&[&q, &k, &v], || attention(&q, &k, &v, &seqs, &spec));
        })
    };
    let (short, long) = (of(2048), of(4096));
    // One f32 matrix of scores of the long sequence would be 64 MiB.
    assert!(long < 16 * MIB, "{long}");
    assert!(long < short * 5 / 2, "{short} {long}");
}

#[test]
fn the_loss_never_holds_all_logits() {
    if passed_in_own_process("the_loss_never_holds_all_logits") {
        return;
    }
    let (t, v, d, chunk) = (4096, 4096, 8, 64);
    let (x, w) = (zeros((t, d), DType::F32), zeros((v, d), DType::F32));
    let w = Weight::trainable(w, GradSink::new(zeros((v, d), DType::F32)).unwrap());
    let targets = Tensor::zeros(t, DType::I64, &Device::Cpu).unwrap();
    let spec = CrossEntropy { reduction: Reduction::Mean, ignore_index: -100, label_smoothing: 0.0, chunk };
    let peak = peak(|| {
        linear_cross_entropy(&x, &w, &targets, &spec, LossGrad::Scalar(1.0)).unwrap();
    });
    // All logits are 64 MiB, those of a chunk 1 MiB.
    assert!(peak < 3 * MIB, "{peak}");
}

#[test]
fn a_bf16_weight_is_never_widened_whole() {
    if passed_in_own_process("a_bf16_weight_is_never_widened_whole") {
        return;
    }
    let (n, k) = (8192, 1024);
    let w = Weight::frozen(zeros((n, k), DType::BF16));
    let x = zeros((4, k), DType::BF16);
    let peak = peak(|| {
        forth_and_back(&[&x], || linear(&x, &w, None, OutputDtype::SameAsInput));
    });
    // The f32 weight would be 32 MiB. A panel is 4 MiB; a processor with large caches packs a few more.
    assert!(peak < 12 * MIB, "{peak}");
}

#[test]
fn weight_gradients_need_no_buffer_of_their_own() {
    if passed_in_own_process("weight_gradients_need_no_buffer_of_their_own") {
        return;
    }
    let (n, k) = (2048, 1024);
    let of = |w: Weight| {
        let x = zeros((4, k), DType::F32);
        peak(|| {
            forth_and_back(&[&x], || linear(&x, &w, None, OutputDtype::SameAsInput));
        })
    };
    let value = || zeros((n, k), DType::F32);
    // The gradient of this weight is 8 MiB.
    for (name, w) in [
        ("frozen", Weight::frozen(value())),
        ("trainable", Weight::trainable(value(), GradSink::new(value()).unwrap())),
    ] {
        let peak = of(w);
        assert!(peak < 4 * MIB, "{name}: {peak}");
    }
}

#[test]
fn a_tiled_mlp_holds_the_inside_of_one_tile() {
    if passed_in_own_process("a_tiled_mlp_holds_the_inside_of_one_tile") {
        return;
    }
    let (t, d, f) = (4096, 32, 512);
    let weight = |n, k| Weight::trainable(zeros((n, k), DType::F32), GradSink::new(zeros((n, k), DType::F32)).unwrap());
    let of = |tile_rows: usize| {
        let w = [weight(f, d), weight(f, d), weight(d, f)];
        let x = zeros((t, d), DType::F32);
        peak(|| {
            let w = w.clone();
            let mlp = move |x: &Tensor, _| {
                let gate = linear(x, &w[0], None, OutputDtype::SameAsInput)?;
                let up = linear(x, &w[1], None, OutputDtype::SameAsInput)?;
                linear(&swiglu(&gate, &up)?, &w[2], None, OutputDtype::SameAsInput)
            };
            forth_and_back(&[&x], || tiled(&x, tile_rows, mlp));
        })
    };
    // One [t, f] is 8 MiB. Backward needs six: gate, up, the gated output, and a gradient of each. A [t, d] is 0.5 MiB.
    let (whole, tiles) = (of(t), of(256));
    assert!(whole > 40 * MIB, "{whole}");
    assert!(tiles < 9 * MIB, "{tiles}");
}

/// The first backward needs the output, saved or recomputed.
#[test]
fn a_gated_output_saved_for_a_backward_that_follows_at_once_costs_no_peak_memory() {
    if passed_in_own_process("a_gated_output_saved_for_a_backward_that_follows_at_once_costs_no_peak_memory") {
        return;
    }
    let (t, d, f) = (1024, 64, 1024);
    let value = zeros((d, f), DType::F32);
    let down = Weight::trainable(value.clone(), GradSink::new(value.zeros_like().unwrap()).unwrap());
    let gate_up = zeros((t, 2 * f), DType::F32);
    let product = || linear(&swiglu_joined(&gate_up)?, &down, None, OutputDtype::SameAsInput);
    let recomputed = || Tape::record(&[&gate_up], product).unwrap();
    let saved = || Tape::replay(SavedOutputs::default(), &[&gate_up], product).unwrap();
    let forward_and_backward = |record: &dyn Fn() -> Tape| {
        peak(|| {
            let tape = record();
            let dy = tape.output().clone();
            tape.backward(&dy).unwrap();
        })
    };
    let tapes: [&dyn Fn() -> Tape; 2] = [&recomputed, &saved];
    let [recomputed, saved] = tapes.map(|record| (held_by(record), forward_and_backward(record)));
    // The gated output is 4 MiB.
    assert!(recomputed.0 < MIB / 2 && saved.0 > 4 * MIB, "{recomputed:?} {saved:?}");
    assert!(saved.1 < recomputed.1 + MIB / 4, "{recomputed:?} {saved:?}");
}

/// In FP8 a layer saves the codes of an input that no other op saves, and a recomputed input is freed when it is quantized.
#[test]
fn fp8_holds_codes_of_inputs_instead_of_inputs() {
    if passed_in_own_process("fp8_holds_codes_of_inputs_instead_of_inputs") {
        return;
    }
    let (t, d, f) = (1024, 64, 1024);
    let rule = ScaleRule { power_of_two: false, amax_epsilon: 0.0 };
    let config = Fp8Config {
        recipe: Fp8Recipe::Current(rule),
        formats: Fp8Formats::Hybrid,
        gradient_rounding: Fp8Rounding::Nearest,
        fake_quantize: false,
    };
    let module = Fp8Module { name: "experts".to_owned(), n_matrices: 2 };
    let layers = Fp8Layers::new(config, vec![Fp8Module::linear("down"), module], &Device::Cpu).unwrap();
    let layers = Arc::new(layers);
    let trainable = |(n, k), name| {
        let value = zeros((n, k), DType::BF16);
        let sink = GradSink::new(zeros((n, k), DType::F32)).unwrap();
        (
            Weight::trainable(value.clone(), sink.clone()),
            Weight::trainable(value, sink).with_fp8(layers.layer(name).unwrap()),
        )
    };
    let _on = layers.enable(0).unwrap();
    // A gated output saved for a backward that follows at once: 2 MiB in bf16.
    let gate_up = zeros((t, 2 * f), DType::BF16);
    let (dense, fp8) = trainable((d, f), "down");
    let down = |w: &Weight| {
        let product = || linear(&swiglu_joined(&gate_up)?, w, None, OutputDtype::SameAsInput);
        held_by(|| Tape::replay(SavedOutputs::default(), &[&gate_up], product).unwrap())
    };
    // The layers share the codes that they have quantized last: the tape holds no others.
    let (dense, fp8) = (down(&dense), down(&fp8));
    assert!(dense > 2 * MIB && fp8 < MIB + MIB / 4, "{dense} {fp8}");
    // Rows of other ranks: 2 MiB in bf16. The permuted rows are recomputed from them, or their codes saved.
    let (dense, fp8) = trainable((2 * d, f), "experts");
    let experts = |w: &Weight| {
        held_by(|| {
            Tape::record(&[], || {
                let received = zeros((t, f), DType::BF16);
                saved_by_readers_only(&received);
                let ids = Tensor::zeros((t, 1), DType::U32, &Device::Cpu)?;
                let assignment = ExpertAssignment::new(&ids, 2)?;
                grouped_linear(&permute(&received, &assignment)?, w, &assignment.offsets, TokensPerCall::Many)
            })
            .unwrap()
        })
    };
    let (dense, fp8) = (experts(&dense), experts(&fp8));
    assert!(dense > 2 * MIB && fp8 < MIB + MIB / 2, "{dense} {fp8}");
}

#[test]
fn tapes_do_not_hold_recomputable_activations() {
    if passed_in_own_process("tapes_do_not_hold_recomputable_activations") {
        return;
    }
    let (t, d, f) = (1024, 64, 1024);
    let trainable =
        |value: Tensor| Weight::trainable(value.clone(), GradSink::new(value.zeros_like().unwrap()).unwrap());
    let (square, down) = (trainable(zeros((d, d), DType::F32)), trainable(zeros((d, f), DType::F32)));
    let norm = trainable(Tensor::zeros(d, DType::F32, &Device::Cpu).unwrap());
    let (x, gate, up) = (zeros((t, d), DType::F32), zeros((t, f), DType::F32), zeros((t, f), DType::F32));
    let product = || linear(&swiglu(&gate, &up)?, &down, None, OutputDtype::SameAsInput);
    let normed = || linear(&rms_norm(&x, &norm, 1e-6)?, &square, None, OutputDtype::SameAsInput);
    // The output of either is 0.25 MiB. The gated output is 4 MiB, the normalised input 0.25.
    let (product, normed) = (held(&[&gate, &up], product), held(&[&x], normed));
    assert!(product < MIB / 2, "{product}");
    assert!(normed < MIB * 3 / 8, "{normed}");
}

/// Granularity: k experts of width f per token. With k * f fixed, so is what a layer holds.
#[test]
fn a_layer_of_experts_holds_gate_and_up_for_any_granularity() {
    if passed_in_own_process("a_layer_of_experts_holds_gate_and_up_for_any_granularity") {
        return;
    }
    let (t, d, e) = (1024, 64, 8);
    let trainable =
        |value: Tensor| Weight::trainable(value.clone(), GradSink::new(value.zeros_like().unwrap()).unwrap());
    let (x, logits) = (zeros((t, d), DType::F32), zeros((t, e), DType::F32));
    let of = |k: usize, f: usize| {
        let gate_up = trainable(zeros((e * 2 * f, d), DType::F32));
        let down = trainable(zeros((e * d, f), DType::F32));
        held(&[&x, &logits], || {
            let routing = route(&logits, None, RouterSpec { top_k: k, ..SPEC })?;
            let assignment = &routing.assignment;
            let rows = permute(&x, assignment)?;
            let hidden = grouped_linear(&rows, &gate_up, &assignment.offsets, TokensPerCall::Many)?;
            let hidden = weighted_swiglu(&hidden, &permute_weights(&routing.weights, assignment)?)?;
            unpermute(&grouped_linear(&hidden, &down, &assignment.offsets, TokensPerCall::Many)?, assignment)
        })
    };
    // Gate and up are 4 MiB, the output 0.25 MiB. The rows of x would be 0.5 or 2 MiB, those of y as much.
    for (k, f) in [(2, 256), (8, 64)] {
        // The first call also allocates the buffers of each thread.
        of(k, f);
        let held = of(k, f);
        assert!((4 * MIB + MIB / 4..4 * MIB + MIB / 2).contains(&held), "{k}: {held}");
    }
}
