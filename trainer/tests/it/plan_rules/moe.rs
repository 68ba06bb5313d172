//! Mixture-of-experts models.

use std::path::Path;

use candlewick_model::Config;
use serde_json::json;
use trainer::plan::{Environment, Plan, WorldInfo};
use trainer::recipe::{Loaded, TokenDispatcherType};

use super::{BASE, known, refused};

/// Resolves the plan of rank 0 of `n_ranks` for a model with 6 experts.
fn of_experts(n_ranks: usize, arguments: &[&str]) -> Result<Plan, String> {
    let config = json!({
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": false, "initializer_range": 0.02, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true, "router_aux_loss_coef": 0.25
    });
    resolve(config, n_ranks, arguments)
}

fn resolve(config: serde_json::Value, n_ranks: usize, arguments: &[&str]) -> Result<Plan, String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    let config = Some(Config::from_json(config).unwrap());
    let environment = Environment { config, world: WorldInfo::first_of(n_ranks), ..known() };
    Plan::resolve(&loaded, &environment).map_err(|error| error.to_string())
}

/// Checks that the arguments are refused with a message that contains these strings.
#[track_caller]
fn refused_with_experts(n_ranks: usize, arguments: &[&str], want: &[&str]) {
    let message = match of_experts(n_ranks, arguments) {
        Ok(_) => panic!("{arguments:?} is accepted"),
        Err(message) => message,
    };
    for part in want {
        assert!(message.contains(part), "no {part:?} in:\n{message}");
    }
}

#[test]
fn the_expert_parallel_degree_divides_ranks_and_experts() {
    let degree = |n_ranks, arguments: &[&str]| of_experts(n_ranks, arguments).map(|plan| plan.ranks.expert);
    assert_eq!(degree(4, &[]), Ok(Some(1)));
    assert_eq!(degree(4, &["expert_parallel_size=2"]), Ok(Some(2)));
    assert_eq!(degree(6, &["expert_parallel_size=6", "deepspeed.zero_optimization.stage=3"]), Ok(Some(6)));
    let of_a_stage = ["expert_parallel_size=2", "pipeline_parallel_size=2", "gradient_accumulation_steps=2"];
    assert_eq!(degree(4, &of_a_stage), Ok(Some(2)));
    let too_many = ["expert_parallel_size=4", "pipeline_parallel_size=2", "gradient_accumulation_steps=2"];
    refused_with_experts(4, &too_many, &["6 experts cannot be divided by 4", "use 1 or 2"]);
    refused_with_experts(4, &["expert_parallel_size=3"], &["the 4 ranks of a pipeline stage cannot be divided by 3"]);
    refused_with_experts(4, &["expert_parallel_size=0"], &["expected at least 1, found 0"]);
}

#[test]
fn the_expert_tensor_parallel_degree_divides_ranks_and_the_width_of_experts() {
    let degree = |n_ranks, arguments: &[&str]| of_experts(n_ranks, arguments).map(|plan| plan.ranks.expert_tensor);
    let (two, three) = ("expert_tensor_parallel_size=2", "expert_tensor_parallel_size=3");
    assert_eq!(degree(4, &[]), Ok(1));
    assert_eq!(degree(4, &[two, "expert_parallel_size=2"]), Ok(2));
    let plan = of_experts(8, &[two, "expert_parallel_size=2", "deepspeed.zero_optimization.stage=1"]).unwrap();
    assert_eq!(plan.ranks.n_expert_shards(), 2);
    assert_eq!(plan.ranks.degrees().to_string(), "dp_shard 8, experts ep 2 x etp 2");
    let groups = ["cannot be divided into 2 expert-parallel groups of 2", "use 1"];
    refused_with_experts(2, &[two, "expert_parallel_size=2"], &groups);
    refused_with_experts(3, &[three], &["the intermediate size 32 of an expert cannot be divided by 3"]);
    refused_with_experts(2, &["expert_tensor_parallel_size=0"], &["expected at least 1, found 0"]);
}

#[test]
fn the_dispatcher_of_tokens_has_the_names_of_megatron() {
    let dispatcher = |arguments: &[&str]| of_experts(1, arguments).unwrap().ranks.token_dispatcher;
    assert_eq!(dispatcher(&[]), TokenDispatcherType::AllToAll);
    assert_eq!(dispatcher(&["moe.token_dispatcher_type=allgather"]), TokenDispatcherType::AllGather);
}

#[test]
fn tensor_parallel_experts_need_sequence_parallelism() {
    let tensor = ["tensor_parallel_size=2", "sequence_parallel=false"];
    refused_with_experts(2, &tensor, &["with tensor parallelism a mixture of experts needs it", "set it to true"]);
    assert!(of_experts(2, &tensor[..1]).unwrap().ranks.sequence_parallel);
}

#[test]
fn a_norm_over_all_heads_refuses_tensor_parallelism() {
    let config = json!({
        "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "initializer_range": 0.02, "num_experts": 4, "num_experts_per_tok": 2
    });
    let message = resolve(config, 2, &["tensor_parallel_size=2"]).unwrap_err();
    assert!(message.contains("the QK norm of this model covers all heads"), "{message}");
}

#[test]
fn coefficients_of_router_losses_come_from_the_model_or_the_recipe() {
    let coefficients = |arguments: &[&str]| {
        let moe = of_experts(1, arguments).unwrap().moe.unwrap();
        (moe.aux_loss_coeff, moe.z_loss_coeff, moe.n_layers)
    };
    assert_eq!(coefficients(&[]), (0.25, 0.0, 2));
    assert_eq!(coefficients(&["moe.aux_loss_coeff=0.5", "moe.z_loss_coeff=1e-3"]), (0.5, 1e-3, 2));
    assert_eq!(coefficients(&["model.peft_config={peft_type: LORA, r: 4, target_modules: all-linear}"]).0, 0.0);
    refused_with_experts(1, &["moe.aux_loss_coeff=-1"], &["moe.aux_loss_coeff"]);
}

#[test]
fn features_that_experts_lack_are_refused() {
    refused_with_experts(1, &["tiled_mlp_compute=true"], &["experts cannot be computed in tiles of tokens"]);
}

#[test]
fn keys_of_experts_need_a_model_with_experts() {
    for argument in [
        "arctic_moe=true",
        "expert_parallel_size=2",
        "expert_tensor_parallel_size=2",
        "moe.aux_loss_coeff=0.1",
        "moe.z_loss_coeff=0.1",
        "moe.token_dispatcher_type=allgather",
    ] {
        refused(&[argument], &[&format!("argument `{argument}`:"), "this model has no experts"]);
    }
    of_experts(1, &["arctic_moe=true"]).unwrap();
}

#[test]
fn keys_of_arctic_training_without_effect_are_noted() {
    let keys = ["enable_arctic_moe_custom_optimization=true", "enable_routing_replay=true"];
    let notes = of_experts(1, &keys).unwrap().notes;
    for key in keys {
        let name = key.split('=').next().unwrap();
        assert!(notes.iter().any(|note| note.contains(&format!("{name} has no effect"))), "{notes:?}");
    }
}

#[test]
fn adam_for_experts_is_adamw() {
    for (kind, dense) in [("fused_adam_moe", "fused_adam"), ("cpu_adam_moe", "cpu_adam")] {
        let optimizer = |kind| of_experts(1, &[&format!("optimizer.type={kind}")]).unwrap().optimizer;
        assert_eq!(optimizer(kind), optimizer(dense));
    }
}
