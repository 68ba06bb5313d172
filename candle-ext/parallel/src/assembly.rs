//! Construction of an engine from a model, the process groups of a mesh, dtypes and memory settings.

use std::sync::Arc;

use candle_core::{DType, Device, Result, bail};
use candlewick_comm::{Collective, Solo};
use candlewick_model::{MixerSplit, Model, RouterSettings};
use candlewick_ops::{Fp8Config, Fp8Layers, GroupedGemmImpl};

use crate::context_parallel::ContextParallel;
use crate::engine::{ActivationCheckpointing, Engine};
use crate::expert_parallel::{ExpertParallel, TokenDispatcher};
use crate::groups::ParallelGroups;
use crate::optimizer::OptimizerGroups;
use crate::params::{CpuOffload, ParamDtypes, ParamStore, StoreMode, StoreOptions, ZeroStage};
use crate::pipeline::{Pipeline, PipelineLayout, PipelineScheduleKind};
use crate::placement::SequenceParallel;

/// Configuration of an engine: dtypes, parallelism and memory.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// Training or inference.
    pub mode: StoreMode,
    /// Dtypes of weights, master weights and optimizer states.
    pub dtypes: ParamDtypes,
    /// Optimizer of the trainable parameters.
    pub optimizer: OptimizerGroups,
    /// ZeRO stage; `None` without sharding.
    pub zero_stage: Option<ZeroStage>,
    /// Megatron-LM's sequence parallelism over the tensor parallel ranks.
    pub sequence_parallel: SequenceParallel,
    /// Layers of each pipeline stage.
    pub layout: PipelineLayout,
    /// Pipeline schedule.
    pub schedule: PipelineScheduleKind,
    /// Parameters and optimizer states that are offloaded to CPU memory.
    pub cpu_offload: CpuOffload,
    /// Activation checkpointing of each layer.
    pub checkpointing: Vec<ActivationCheckpointing>,
    /// Exchange of tokens between expert parallel ranks.
    pub token_dispatcher: TokenDispatcher,
    /// Settings of the routers.
    pub router: RouterSettings,
    /// Settings of FP8 in the linear layers that the model marks; `None` if all multiply in the compute dtype.
    pub fp8: Option<Fp8Config>,
    /// True if ZeRO stage 3 gathers weights that multiply in FP8 as codes of a byte.
    pub fp8_param_gather: bool,
    /// Dtype in which data-parallel ranks send gradients; `None` sends the dtype of gradients, and sums in f32.
    pub reduce_dtype: Option<DType>,
}

impl EngineSpec {
    /// Returns the configuration of an engine that trains, without activation checkpointing or ZeRO.
    pub fn training(dtypes: ParamDtypes, layout: PipelineLayout) -> Self {
        let checkpointing = vec![ActivationCheckpointing::None; layout.n_blocks()];
        Self {
            mode: StoreMode::Train,
            dtypes,
            optimizer: OptimizerGroups::default(),
            zero_stage: None,
            sequence_parallel: SequenceParallel::Off,
            layout,
            schedule: PipelineScheduleKind::default(),
            cpu_offload: CpuOffload::default(),
            checkpointing,
            token_dispatcher: TokenDispatcher::default(),
            router: RouterSettings::default(),
            fp8: None,
            fp8_param_gather: false,
            reduce_dtype: None,
        }
    }

    /// Returns the configuration of an inference engine that computes in `dtype`.
    pub fn inference(dtype: DType, layout: PipelineLayout) -> Self {
        Self { mode: StoreMode::Infer, ..Self::training(ParamDtypes::computing_in(dtype), layout) }
    }

    /// Builds this rank's engine over `groups`, with uninitialized parameters. Collective: all ranks must call it.
    ///
    /// Training sums losses over `groups.loss`. Inference returns each rank's own losses.
    pub fn build(self, model: Model, groups: &ParallelGroups, device: Device) -> Result<Engine> {
        self.build_sharing(model, groups, device, None)
    }

    /// Builds an engine like [`EngineSpec::build`], which shares the frozen weights of `base`.
    pub fn build_sharing(
        self,
        model: Model,
        groups: &ParallelGroups,
        device: Device,
        base: Option<&Engine>,
    ) -> Result<Engine> {
        check_mixers(&model, groups)?;
        let Self { mode, dtypes, zero_stage, sequence_parallel, layout, schedule, cpu_offload, .. } = self;
        let (checkpointing, router, dispatcher) = (self.checkpointing, self.router, self.token_dispatcher);
        let sharding = groups.sharding_groups(zero_stage, layout.clone(), sequence_parallel);
        let (optimizer, fp8_param_gather) = (self.optimizer, self.fp8_param_gather);
        let options = StoreOptions { dtypes, mode, cpu_offload, fp8_param_gather, optimizer };
        let mut store = ParamStore::sharing(model.units(), options, &device, sharding, base.map(Engine::store))?;
        if let Some(dtype) = self.reduce_dtype {
            store = store.with_reduce_dtype(dtype);
        }
        if let Some(config) = self.fp8 {
            store = store.with_fp8(Fp8Layers::new(config, model.fp8_modules(), &device)?)?;
        }
        let losses: Arc<dyn Collective> = match mode {
            StoreMode::Train => Arc::clone(&groups.loss),
            StoreMode::Infer => Arc::new(Solo),
        };
        let pipeline = Pipeline::new(Arc::clone(&groups.pp), layout, schedule)?;
        let mut engine =
            Engine::new(model, store, checkpointing, losses, device).with_pipeline(pipeline).with_router(router);
        if groups.cp.size() * groups.sp.size() > 1 {
            engine = engine.with_context_parallel(ContextParallel::new(Arc::clone(&groups.cp), Arc::clone(&groups.sp)));
        }
        if groups.tp.size() > 1 {
            engine = engine.with_tensor_parallel(groups.tensor_parallel(sequence_parallel));
        }
        if let Some(experts) = groups.expert_parallel(sequence_parallel) {
            engine = engine.with_expert_parallel(experts.with_dispatcher(dispatcher));
        }
        Ok(engine)
    }
}

/// Rejects a mesh that splits a mixer as it does not support.
fn check_mixers(model: &Model, groups: &ParallelGroups) -> Result<()> {
    let splits =
        [(MixerSplit::Tensor, &groups.tp), (MixerSplit::Context, &groups.cp), (MixerSplit::Ulysses, &groups.sp)];
    let refusal = |(split, ranks): &(MixerSplit, &Arc<dyn Collective>)| {
        model.layers().find_map(|layer| layer.refusal(*split, ranks.size()))
    };
    splits.iter().find_map(refusal).map_or(Ok(()), |message| bail!("{message}"))
}

impl Engine {
    /// Sets the implementation of the experts' matmuls on a GPU.
    pub fn with_experts_implementation(self, implementation: GroupedGemmImpl) -> Self {
        self.with_routing(|routing| routing.with_implementation(implementation))
    }

    /// Sets the expert parallel groups, which must be those of the parameter store.
    pub fn with_expert_parallel(self, experts: ExpertParallel) -> Self {
        self.with_routing(|routing| routing.with_experts(experts))
    }

    /// Sets the settings of the routers. Each of their losses needs a coefficient in
    /// [`StepLoss::auxiliary`](crate::StepLoss::auxiliary). Inference has [`RouterSettings::of_evaluation`].
    pub fn with_router(self, router: RouterSettings) -> Self {
        self.with_routing(|routing| routing.with_settings(router))
    }
}
