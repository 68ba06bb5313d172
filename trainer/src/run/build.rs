//! Construction of a plan's engine: the model, its weights and its activation checkpointing.

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device, DeviceLocation};
use candlewick_model::Config;
use candlewick_ops::{AttentionPasses, gpus, measure_cpu_gemm_rate, require_batch_invariance};
use candlewick_parallel::{CpuOffload, Engine, EngineSpec, OffloadTarget, ParamDtypes};

use crate::exit::ExitCode;
use crate::metrics::{PeakRate, gpu_peak};
use crate::plan::{OptimizerPlan, PipelinePlan, Plan, RanksPlan, RouterPlan, checkpointing, dtype};
use crate::recipe::DeterministicMode;

use super::initial_weights::InitialWeights;
use super::slower_modules::{self, EarlierRun};
use super::{Assets, RankContext};

/// An engine, with notes and measurements from its construction.
pub(super) struct Built {
    pub(super) engine: Engine,
    /// Notes for the user.
    pub(super) notes: Vec<String>,
    /// Peak rate of the device's matmuls, if known.
    pub(super) peak: Option<PeakRate>,
    /// Modules that `precision.exclude_slower_modules` keeps in the compute dtype.
    pub(super) slower_modules: Option<Vec<String>>,
}

/// Builds the model and sets its weights.
pub(super) fn engine(plan: &Plan, assets: &Assets, ranks: &RankContext, earlier: &EarlierRun<'_>) -> Result<Built> {
    let config = plan.model.config.clone().context("failed to build the model: its config is not known")?;
    let n_ids = assets.tokenizer.min_embedding_rows() as usize;
    if n_ids > config.vocab_size() {
        let error = anyhow!(
            "failed to use the tokenizer with this model: it has ids up to {}, and the model's vocab_size is {}; use the \
             tokenizer that the model was trained with",
            n_ids - 1,
            config.vocab_size()
        );
        return Err(error.context(ExitCode::Data));
    }
    let model = plan.build_model(config)?;
    let device = ranks.device.clone();
    let supported = ranks.groups.dp.check_device(&device);
    supported.map_err(|error| anyhow!("failed to start: {error}; set ddp_backend: auto").context(ExitCode::Usage))?;
    if plan.deterministic == DeterministicMode::BatchInvariant {
        let required = require_batch_invariance(&device);
        required.map_err(|error| anyhow!("failed to start: {error}").context(ExitCode::Usage))?;
    }
    // Measure before the model is allocated, so that the allocator reuses this memory.
    let peak = peak(&device, dtype(plan.model.dtype));
    let OptimizerPlan { masters, moments, .. } = plan.optimizer;
    let [compute, masters, optimizer_states] = [plan.model.dtype, masters, moments].map(dtype);
    let attention = plan.model.attention;
    let of_model = model.config().attention(plan.data.max_length);
    let note = attention.explain(&device, compute, of_model, AttentionPasses::Both);
    let notes = [note, explain_experts(plan, model.config(), &device)];
    let notes: Result<Vec<_>, _> = notes.into_iter().collect();
    let notes = notes.map_err(|error| anyhow!("failed to start: {error}").context(ExitCode::Usage))?;
    let mut notes: Vec<String> = notes.into_iter().flatten().collect();
    if plan.optimizer_on_host > 0.0 && device.is_cpu() {
        let what = if plan.weights_on_host { "weights and optimizer are" } else { "the optimizer is" };
        notes.push(format!("{what} not offloaded: the compute device is the CPU, whose memory is the host memory"));
    }
    let cpu_offload = match device.is_cpu() {
        true => CpuOffload::default(),
        false => CpuOffload { optimizer: plan.optimizer_on_host, weights: plan.weights_on_host },
    };
    let offload_target = match device.is_cpu() {
        true => OffloadTarget::Folder(plan.model.activation_offload_dir.clone()),
        false => OffloadTarget::HostMemory,
    };
    let (model, slower_modules) = slower_modules::exclude(plan, model, ranks, earlier, &mut notes)?;
    let dtypes = ParamDtypes { compute, masters, optimizer_states };
    let reduce_dtype = plan.ranks.reduce_dtype.map(dtype);
    let spec = engine_spec(plan, &plan.ranks, &plan.pipeline, model.config());
    let spec = EngineSpec { dtypes, cpu_offload, reduce_dtype, ..spec };
    let engine = spec
        .build(model, &ranks.groups, device)?
        .with_attention(attention)
        .with_experts_implementation(plan.model.experts_implementation)
        .with_offload_target(offload_target)
        .with_tiled_mlp(plan.model.tiled_mlp())
        .with_label_smoothing(plan.label_smoothing_factor as f32);
    for note in InitialWeights::open(plan, assets.model_folder.as_deref())?.load(&engine)? {
        tracing::warn!("{note}");
    }
    Ok(Built { engine, notes, peak, slower_modules })
}

/// Describes the implementation of the experts' matmuls, if the model has experts.
fn explain_experts(plan: &Plan, config: &Config, device: &Device) -> candle_core::Result<Option<String>> {
    let Some(moe) = config.moe() else { return Ok(None) };
    let sizes = [config.hidden_size(), moe.expert_size / plan.ranks.expert_tensor.max(1)];
    plan.model.experts_implementation.explain(device, dtype(plan.model.dtype), sizes)
}

/// Returns the spec of an f32 engine with the plan's activation checkpointing, on the mesh of `ranks` and the stages of
/// `pipeline`.
pub(crate) fn engine_spec(plan: &Plan, ranks: &RanksPlan, pipeline: &PipelinePlan, config: &Config) -> EngineSpec {
    EngineSpec {
        token_dispatcher: ranks.token_dispatcher(),
        router: plan.moe.as_ref().map(RouterPlan::settings).unwrap_or_default(),
        optimizer: plan.optimizer.groups(),
        zero_stage: ranks.zero_stage(),
        sequence_parallel: ranks.sequence_parallel(),
        schedule: pipeline.schedule_kind(),
        checkpointing: checkpointing(plan.model.activations, config.n_layers()),
        fp8: plan.fp8.as_ref().map(|fp8| fp8.config(plan.seed)),
        fp8_param_gather: plan.fp8.as_ref().is_some_and(|fp8| fp8.param_gather),
        ..EngineSpec::training(ParamDtypes::computing_in(DType::F32), pipeline.layout(config))
    }
}

/// Returns the peak rate of matmuls: of a GPU in bf16, by its name; of the CPU in `dtype`, as measured now.
fn peak(device: &Device, dtype: DType) -> Option<PeakRate> {
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => gpus().get(gpu_id).and_then(|gpu| gpu_peak(&gpu.name)).map(PeakRate::rated),
        _ => Some(PeakRate::measured(measure_cpu_gemm_rate, dtype)),
    }
}
