//! Test inputs: a tiny model of each family, and the sequences of a step in micro-batches.

use candle_core::{Device, Tensor};
use candlewick_model::{Config, LoraConfig, Model};
use candlewick_ops::{CuSeqlens, Fp8Config, WeightStorage};
use candlewick_parallel::{Micro, MicroColumns};
use serde_json::{Value, json};

/// A vocabulary that four ranks cannot divide evenly.
const VOCAB: u32 = 50;

/// A tiny model to train.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelCase {
    family: &'static str,
    tied: bool,
    /// True if every linear layer has a bias.
    biased: bool,
    /// Dropout of a LoRA adapter on a frozen base; `None` trains all weights.
    adapter: Option<f64>,
    /// PEFT's selection of the adapter's modules.
    targets: AdapterTargets,
    /// Sliding window in tokens.
    window: Option<usize>,
    /// Storage of the linear layers of an adapter's base.
    storage: WeightStorage,
    /// Layers for multi-token prediction.
    n_mtp_layers: usize,
    /// Settings of FP8, in which all linear layers multiply.
    fp8: Option<Fp8Config>,
    /// True if the weight of an expert multiplies its input. A token then selects one expert.
    weighs_inputs: bool,
    /// Scaling of RoPE that extends a context of 8 tokens, which some sequences exceed.
    rope: RopeScaling,
    router: Router,
}

/// Router of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Router {
    /// The family's.
    Family,
    /// Softmax after the selection, from two of four groups.
    SoftmaxLast,
    /// Square root of softplus, with expert biases and a factor.
    SqrtSoftplus,
}

/// Scaling of RoPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RopeScaling {
    Default,
    Yarn,
    LongRope,
    Dynamic,
}

/// PEFT's selection of an adapter's modules.
#[derive(Clone, Copy, Debug)]
enum AdapterTargets {
    /// All linear layers.
    AllLinear,
    /// 3-D parameters of experts and the routers' weights, with all linear layers.
    Parameters,
    /// Modules of single experts and routers, as in transformers 4.
    Experts,
}

/// An adapter with dropout. The mask depends on a token's position in its micro-batch: it is equal only on ranks that share
/// micro-batches.
pub(crate) const ADAPTER: ModelCase = ModelCase { adapter: Some(0.3), ..ModelCase::of("qwen3", true) };

/// An adapter without dropout on a dense base.
pub(crate) const DENSE_BASE: ModelCase = ModelCase { adapter: Some(0.0), ..ModelCase::of("qwen3", true) };

/// A mixture of experts in every second layer, without a shared expert.
pub(crate) const QWEN3_MOE: ModelCase = ModelCase::of("qwen3_moe", true);

/// A mixture of experts with sigmoid scores, groups, an expert bias and a shared expert, after a dense layer.
pub(crate) const DOTS1: ModelCase = ModelCase::of("dots1", false);

/// Routers with keys of Megatron-LM that the family does not have.
pub(crate) const ROUTERS: [ModelCase; 2] =
    [ModelCase { router: Router::SoftmaxLast, ..QWEN3_MOE }, ModelCase { router: Router::SqrtSoftplus, ..QWEN3_MOE }];

/// Half-rotated heads with biases, and a mixture of experts with sigmoid scores after a dense layer.
pub(crate) const GLM4_MOE: ModelCase = ModelCase::of("glm4_moe", false);

/// A mixture of experts in every second layer, whose weights multiply the inputs of experts.
pub(crate) const WEIGHTED_INPUTS: ModelCase = ModelCase { weighs_inputs: true, ..QWEN3_MOE };

/// Adapters of the experts' 3-D parameters and of the routers.
pub(crate) const PARAMETERS: ModelCase =
    ModelCase { adapter: Some(0.0), targets: AdapterTargets::Parameters, ..QWEN3_MOE };

/// Adapters of gate, up and down projections of experts and of the routers, and of the shared experts.
pub(crate) const EXPERT_MODULES: ModelCase =
    ModelCase { adapter: Some(0.0), targets: AdapterTargets::Experts, ..DOTS1 };

/// [`EXPERT_MODULES`] with dropout.
pub(crate) const DROPPED_EXPERT_MODULES: ModelCase = ModelCase { adapter: Some(0.3), ..EXPERT_MODULES };

/// Adapters with dropout on all linear layers, also on the gate of the shared expert. The base is a mixture of experts with a
/// gated shared expert in every second layer.
pub(crate) const SHARED_EXPERT_GATE: ModelCase = ModelCase { adapter: Some(0.3), ..ModelCase::of("qwen2_moe", false) };

/// Two MTP layers, with an output layer of their own.
pub(crate) const MTP: ModelCase = ModelCase { n_mtp_layers: 2, ..ModelCase::of("qwen2", false) };

/// Two MTP layers, with the embedding as output layer.
pub(crate) const TIED_MTP: ModelCase = ModelCase { n_mtp_layers: 2, ..ModelCase::of("qwen3", true) };

/// An MTP layer with experts.
pub(crate) const MOE_MTP: ModelCase = ModelCase { n_mtp_layers: 1, ..DOTS1 };

/// Models with each scaling of RoPE. LongRoPE and dynamic scaling depend on the length of a sequence.
pub(crate) const SCALED: [ModelCase; 3] = [
    ModelCase { rope: RopeScaling::LongRope, ..ModelCase::of("llama", false) },
    ModelCase { rope: RopeScaling::Dynamic, ..ModelCase::of("qwen3", true) },
    ModelCase { rope: RopeScaling::Yarn, ..ModelCase::of("qwen2", false) },
];

/// A window shorter than the longest sequences.
pub(crate) const WINDOW: ModelCase = ModelCase { window: Some(11), ..ModelCase::of("mistral", false) };

pub(crate) const MODELS: [ModelCase; 4] = [
    ModelCase::of("llama", false),
    ModelCase { biased: true, ..ModelCase::of("llama", true) },
    ModelCase::of("qwen2", false),
    ModelCase::of("qwen3", true),
];

/// Batching of a step's sequences into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Batching {
    /// Packed sequences in one micro-batch.
    Packed,
    /// Sequences padded to one length.
    Padded,
    /// Packed sequences in this number of micro-batches.
    Accumulated(usize),
    /// A few long sequences, packed.
    Long,
}

pub(crate) const BATCHINGS: [Batching; 3] = [Batching::Packed, Batching::Padded, Batching::Accumulated(2)];

/// Experts of a layer; eight ranks hold one each.
const N_EXPERTS: usize = 8;

/// Sequences of one step.
const N_SEQUENCES: usize = 16;
const PADDED_TO: usize = 12;
/// Number of long sequences of one step, and their extra tokens.
const N_LONG: usize = 4;
const LONGER: usize = 20;

impl ModelCase {
    const fn of(family: &'static str, tied: bool) -> Self {
        Self {
            family,
            tied,
            biased: false,
            adapter: None,
            targets: AdapterTargets::AllLinear,
            window: None,
            storage: WeightStorage::Dense,
            n_mtp_layers: 0,
            fp8: None,
            weighs_inputs: false,
            rope: RopeScaling::Default,
            router: Router::Family,
        }
    }

    pub(crate) const fn with_fp8(self, config: Fp8Config) -> Self {
        Self { fp8: Some(config), ..self }
    }

    pub(crate) fn fp8(self) -> Option<Fp8Config> {
        self.fp8
    }

    pub(crate) const fn n_mtp_layers(self) -> usize {
        self.n_mtp_layers
    }

    pub(crate) const fn stored_as(self, storage: WeightStorage) -> Self {
        Self { storage, ..self }
    }

    pub(crate) fn has_experts(self) -> bool {
        ["qwen2_moe", "qwen3_moe", "dots1", "glm4_moe"].contains(&self.family)
    }

    pub(crate) fn has_dropout(self) -> bool {
        self.adapter.is_some_and(|dropout| dropout > 0.0)
    }

    pub(crate) const fn without_adapter(self) -> Self {
        Self { adapter: None, ..self }
    }

    pub(crate) fn model(self) -> Model {
        let class = match self.family {
            "llama" => "LlamaForCausalLM",
            "mistral" => "MistralForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            "qwen2_moe" => "Qwen2MoeForCausalLM",
            "qwen3_moe" => "Qwen3MoeForCausalLM",
            "dots1" => "Dots1ForCausalLM",
            "glm4_moe" => "Glm4MoeForCausalLM",
            _ => "Qwen3ForCausalLM",
        };
        let mut config = json!({
            "architectures": [class], "model_type": self.family, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
            "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "tie_word_embeddings": self.tied, "initializer_range": 0.2,
        });
        let experts = match self.family {
            "qwen3_moe" => json!({
                "num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": true,
                "decoder_sparse_step": 2,
            }),
            "qwen2_moe" => json!({
                "num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2,
            }),
            "dots1" => json!({
                "n_routed_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": true,
                "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
            }),
            "glm4_moe" => json!({
                "n_routed_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "use_qk_norm": true,
                "attention_bias": true, "partial_rotary_factor": 0.5,
            }),
            _ => json!({}),
        };
        let router = match self.router {
            Router::Family => json!({}),
            Router::SoftmaxLast => json!({
                "moe_router_pre_softmax": false, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
            }),
            Router::SqrtSoftplus => json!({
                "moe_router_score_function": "sqrtsoftplus", "moe_router_enable_expert_bias": true,
                "moe_router_topk_scaling_factor": 1.5,
            }),
        };
        for (key, value) in experts.as_object().unwrap().iter().chain(router.as_object().unwrap()) {
            config[key] = value.clone();
        }
        if self.weighs_inputs {
            config["moe_apply_probs_on_input"] = json!(true);
            config["num_experts_per_tok"] = json!(1);
            // The normalized weight of a single expert is constant.
            config["norm_topk_prob"] = json!(false);
        }
        if self.biased {
            config["attention_bias"] = json!(true);
            config["mlp_bias"] = json!(true);
        }
        if let Some(window) = self.window {
            config["sliding_window"] = json!(window);
        }
        self.scale_rope(&mut config);
        let lora = self.adapter.map(|dropout| LoraConfig::from_json(&self.peft_config(dropout)).unwrap());
        let config = Config::from_json(config).unwrap().with_mtp_layers(self.n_mtp_layers);
        let model = Model::new(config, lora).unwrap().with_frozen_storage(self.storage);
        let linears = model.layers().flat_map(|layer| layer.linears()).map(|linear| linear.module.clone());
        let experts = model.layers().flat_map(|layer| layer.expert_matrices()).map(|matrix| matrix.name.clone());
        let modules: Vec<String> = linears.chain(experts).collect();
        if self.fp8.is_some() { model.with_fp8(&modules) } else { model }
    }
}

impl ModelCase {
    fn scale_rope(self, config: &mut Value) {
        let original = 8;
        let scaling = match self.rope {
            RopeScaling::Default => return,
            RopeScaling::Yarn => json!({
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, "beta_fast": 2.0,
            }),
            RopeScaling::LongRope => json!({
                "rope_type": "longrope", "original_max_position_embeddings": original,
                "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0],
            }),
            RopeScaling::Dynamic => {
                config["max_position_embeddings"] = json!(original);
                json!({"rope_type": "dynamic", "factor": 4.0})
            }
        };
        config["rope_scaling"] = scaling;
    }

    fn peft_config(self, dropout: f64) -> Value {
        let mut peft_config =
            json!({"r": 4, "lora_alpha": 16, "lora_dropout": dropout, "target_modules": "all-linear"});
        match self.targets {
            AdapterTargets::AllLinear => {}
            AdapterTargets::Parameters => {
                peft_config["target_parameters"] = json!(["gate_up_proj", "experts.down_proj", "mlp.gate.weight"]);
            }
            AdapterTargets::Experts => {
                peft_config["target_modules"] = json!(["q_proj", "gate_proj", "up_proj", "down_proj", "mlp.gate"]);
            }
        }
        peft_config
    }
}

/// Pseudo-random number of a step, a sequence and a position.
fn hash(step: usize, sequence: usize, at: usize) -> u64 {
    let mut x = (step as u64) << 40 ^ (sequence as u64) << 20 ^ at as u64;
    for _ in 0..3 {
        x = (x ^ (x >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x632b_e593_bd9b_4e01);
    }
    x >> 33
}

/// Ids and targets of a sequence; about a third of the targets are ignored.
pub(crate) fn sequence(batching: Batching, step: usize, idx: usize) -> Vec<(u32, i64)> {
    let n = 3 + hash(step, idx, 1000) as usize % (PADDED_TO - 3);
    let longer = if batching == Batching::Long { LONGER } else { 0 };
    (0..n + longer)
        .map(|at| {
            let (id, target) = (hash(step, idx, at), hash(step, idx, at + 500));
            let target = if target % 3 == 0 { Micro::IGNORED } else { (target / 3) as i64 % i64::from(VOCAB) };
            ((id % u64::from(VOCAB)) as u32, target)
        })
        .collect()
}

/// Returns the micro-batches of data rank `rank` of `n_ranks` in a step, and the number of their targets.
pub(crate) fn micros(batching: Batching, step: usize, rank: usize, n_ranks: usize) -> (Vec<Micro>, f64) {
    let n_micros = if let Batching::Accumulated(n_micros) = batching { n_micros } else { 1 };
    let n_sequences = if batching == Batching::Long { N_LONG } else { N_SEQUENCES };
    let mut n_targets = 0;
    let mut micros = Vec::new();
    for micro in 0..n_micros {
        let of_micro = (0..n_sequences).filter(|idx| idx % n_micros == micro);
        let own =
            of_micro.enumerate().filter(|(at, _)| at % n_ranks == rank).map(|(_, idx)| sequence(batching, step, idx));
        let mut own: Vec<_> = own.collect();
        n_targets += own.iter().flatten().filter(|(_, target)| *target != Micro::IGNORED).count();
        let mut padding = Vec::new();
        if batching == Batching::Padded {
            for (i, sequence) in own.iter_mut().enumerate() {
                padding.push(i * PADDED_TO + sequence.len()..(i + 1) * PADDED_TO);
                sequence.resize(PADDED_TO, (0, Micro::IGNORED));
            }
        }
        micros.push(Micro { padding, ..packed(&own) });
    }
    (micros, n_targets as f64)
}

pub(crate) fn packed(sequences: &[Vec<(u32, i64)>]) -> Micro {
    let mut ends = vec![0];
    ends.extend(sequences.iter().scan(0, |end, sequence| {
        *end += sequence.len();
        Some(*end)
    }));
    let (ids, targets): (Vec<u32>, Vec<i64>) = sequences.iter().flatten().copied().unzip();
    Micro {
        ids: Tensor::new(ids, &Device::Cpu).unwrap(),
        targets: Tensor::new(targets, &Device::Cpu).unwrap(),
        positions: sequences.iter().flat_map(|sequence| 0..sequence.len() as u32).collect(),
        seqs: CuSeqlens::packed(ends).unwrap(),
        padding: Vec::new(),
        columns: MicroColumns::default(),
    }
}
