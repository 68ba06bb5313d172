//! Training steps in FP8 by the CUDA kernels, in the emulator.

use std::sync::Arc;

use candle_core::{DType, Device};
use candlewick_comm::Solo;
use candlewick_model::{LayerSpec, Model, TiledMlp};
use candlewick_ops::{
    AmaxHistoryPolicy, DelayedScaling, Fp8Config, Fp8Formats, Fp8Kernels, Fp8Layers, Fp8Recipe, Fp8Rounding, ScaleRule,
};
use candlewick_parallel::{ActivationCheckpointing, CpuOffload, Engine, ParamDtypes};

use crate::engine::{config, filled_store, grads, micro, sequences, train};

fn engine(
    (formats, recipe): (Fp8Formats, Fp8Recipe),
    checkpointing: ActivationCheckpointing,
    tiled_mlp: TiledMlp,
) -> Engine {
    let model = Model::new(config(true), None).unwrap();
    let modules: Vec<String> =
        model.layers().flat_map(LayerSpec::linears).map(|linear| linear.module.clone()).collect();
    let model = model.with_fp8(&modules);
    let fp8 = Fp8Config { recipe, formats, gradient_rounding: Fp8Rounding::Nearest, fake_quantize: false };
    let fp8 = Fp8Layers::new(fp8, model.fp8_modules(), &Device::Cpu).unwrap();
    let store = filled_store(&model, ParamDtypes::computing_in(DType::BF16), CpuOffload::default());
    let plan = vec![checkpointing; model.n_blocks()];
    let engine = Engine::new(model, store.with_fp8(fp8).unwrap(), plan, Arc::new(Solo), Device::Cpu);
    engine.with_tiled_mlp(tiled_mlp)
}

/// MLPs and norms are quantized where they are computed from the second step of delayed scaling on.
#[test]
fn fused_kernels_change_no_bit_of_a_training_step() {
    let scaling = DelayedScaling { margin: 0, amax_history_len: 2, amax_compute: AmaxHistoryPolicy::Max };
    let blockwise = Fp8Recipe::Blockwise(ScaleRule { power_of_two: true, amax_epsilon: 0.0 });
    let (delayed, blockwise) = ((Fp8Formats::Hybrid, Fp8Recipe::Delayed(scaling)), (Fp8Formats::E4m3, blockwise));
    let (none, full) = (ActivationCheckpointing::None, ActivationCheckpointing::Full);
    // 16 tokens can be fused, and 15 cannot.
    for (recipe, last, checkpointing, tiled_mlp) in [
        (delayed, 6, none, TiledMlp::Off),
        (delayed, 6, full, TiledMlp::Off),
        (delayed, 5, none, TiledMlp::On),
        (blockwise, 6, none, TiledMlp::Off),
    ] {
        let batch = sequences(&[9, 1, last]);
        let steps = |kernels: Fp8Kernels| {
            kernels.select();
            let engine = engine(recipe, checkpointing, tiled_mlp);
            candlewick_ops::emulate(|| {
                [5, 6].map(|key| {
                    engine.store().zero_grads().unwrap();
                    let loss = train(&engine, &micro(&batch), &batch, key);
                    engine.update_fp8_scales().unwrap();
                    (loss, grads(&engine))
                })
            })
        };
        let want = steps(Fp8Kernels::SharedMemory);
        assert!(recipe == blockwise || want[0] != want[1], "the scales have no effect");
        assert_eq!(steps(Fp8Kernels::Fused), want, "{recipe:?} {checkpointing:?}");
    }
    Fp8Kernels::default().select();
}
