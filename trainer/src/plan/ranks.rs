//! The degrees of parallelism of a plan, and its ZeRO stage.

use candlewick_comm::mesh::Degrees;
use candlewick_parallel::{SequenceParallel, SplitSizes, TokenDispatcher, ZeroStage};
use serde::Serialize;

use crate::recipe::{DdpBackend, FloatDtype, TokenDispatcherType};

/// The degrees of parallelism of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RanksPlan {
    /// Data-parallel replicas of the sharded model (HSDP).
    pub dp_replicate: usize,
    /// Data-parallel ranks that shard the model and compute different micro-batches.
    pub dp_shard: usize,
    /// The context-parallel degree: ranks exchange keys and values of a micro-batch in a ring.
    pub context: usize,
    /// The Ulysses degree: ranks exchange attention heads. The number of shards is `dp_shard` x `context` x `sequence`.
    pub sequence: usize,
    /// The tensor-parallel degree.
    pub tensor: usize,
    /// True if tensor-parallel ranks shard the tokens outside of attention and MLP.
    pub sequence_parallel: bool,
    /// Expert-parallel ranks, which divide the experts of each layer; `None` for a dense model.
    pub expert: Option<usize>,
    /// Ranks that split the matrices of each expert.
    pub expert_tensor: usize,
    /// The exchange of tokens between expert-parallel ranks.
    pub token_dispatcher: TokenDispatcherType,
    /// Pipeline stages.
    pub stages: usize,
    /// Seconds without a heartbeat after which a rank counts as failed.
    pub timeout: usize,
    /// The communication backend.
    pub backend: DdpBackend,
    /// The ZeRO stage: it shards nothing (0), optimizer state (1), gradients too (2), weights too (3).
    pub zero_stage: usize,
    /// The dtype in which data-parallel ranks send gradients; `None` is the dtype of gradients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reduce_dtype: Option<FloatDtype>,
}

impl RanksPlan {
    /// Returns the plan of a single rank.
    pub fn alone() -> Self {
        Self {
            dp_replicate: 1,
            dp_shard: 1,
            context: 1,
            sequence: 1,
            tensor: 1,
            sequence_parallel: true,
            expert: None,
            expert_tensor: 1,
            token_dispatcher: TokenDispatcherType::default(),
            stages: 1,
            timeout: 1800,
            backend: DdpBackend::Auto,
            zero_stage: 0,
            reduce_dtype: None,
        }
    }

    /// Returns the number of ranks that compute different micro-batches.
    pub fn n_data(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }

    /// Returns the number of ranks that share the tokens of a micro-batch.
    pub fn n_of_micro_batch(&self) -> usize {
        self.context * self.sequence
    }

    /// Returns the degrees of the mesh.
    pub fn degrees(&self) -> Degrees {
        let Self { dp_replicate, dp_shard, context: cp, sequence: sp, tensor: tp, stages: pp, .. } = *self;
        let (ep, etp) = (self.expert.unwrap_or(1), self.expert_tensor);
        Degrees { pp, dp_replicate, dp_shard, cp, sp, tp, ep, etp }
    }

    /// Returns the model-parallel size: the tensor-parallel size times the pipeline stages.
    pub fn model_parallel_size(&self) -> usize {
        self.tensor * self.stages
    }

    /// Returns the number of all ranks.
    pub fn n_ranks(&self) -> usize {
        self.n_data() * self.n_of_micro_batch() * self.model_parallel_size()
    }

    /// Returns the setting of sequence parallelism.
    pub fn sequence_parallel(&self) -> SequenceParallel {
        if self.sequence_parallel { SequenceParallel::On } else { SequenceParallel::Off }
    }

    /// Returns the number of ZeRO shards.
    pub fn n_shards(&self) -> usize {
        self.dp_shard * self.n_of_micro_batch()
    }

    /// Returns the number of ZeRO shards of experts: the expert-data-parallel ranks.
    pub fn n_expert_shards(&self) -> usize {
        self.n_data() * self.n_of_micro_batch() * self.tensor / self.n_expert_ranks()
    }

    /// Returns the most ranks that sum the gradients of a parameter, dense or of an expert.
    pub fn n_gradient_ranks(&self) -> usize {
        let of_experts = self.expert.map_or(1, |_| self.n_expert_shards());
        of_experts.max(self.dp_replicate * self.n_shards())
    }

    /// Returns the number of ranks that hold the experts of a stage once: they exchange tokens.
    pub fn n_expert_ranks(&self) -> usize {
        self.expert.unwrap_or(1) * self.expert_tensor
    }

    /// Returns the numbers of ranks that split parameters.
    pub fn split_sizes(&self) -> SplitSizes {
        let (expert, expert_tensor) = (self.expert.unwrap_or(1), self.expert_tensor);
        SplitSizes { tensor: self.tensor, expert, expert_tensor }
    }

    /// Returns the exchange of tokens between expert-parallel ranks.
    pub fn token_dispatcher(&self) -> TokenDispatcher {
        match self.token_dispatcher {
            TokenDispatcherType::AllToAll => TokenDispatcher::AllToAll,
            TokenDispatcherType::AllGather => TokenDispatcher::AllGather,
        }
    }

    /// Returns the ZeRO stage; `None` for stage 0.
    pub fn zero_stage(&self) -> Option<ZeroStage> {
        match self.zero_stage {
            3 => Some(ZeroStage::Three),
            2 => Some(ZeroStage::Two),
            1 => Some(ZeroStage::One),
            _ => None,
        }
    }
}
