//! Mixture-of-experts models.

use std::path::Path;

use candlewick_model::RouterLoss::{
    self, GlobalLoadBalancing, LoadBalancing, SequenceLoadBalancing, TransformersLoadBalancing, Z,
};
use candlewick_model::{Config, ExpertCapacity, ForcedExpertLoad, RouterDtype, RouterSettings};
use candlewick_ops::{DropPolicy, GroupedGemmImpl};
use serde_json::json;
use trainer::plan::{Plan, RoutingReplayPlan};
use trainer::plan_report::SettingsFilter;
use trainer::recipe::{Loaded, TokenDispatcherType};
use trainer::resolve::{Environment, WorldInfo};

use super::{BASE, known, refused};

/// Returns the config of a model with expert biases and 4 experts.
fn dots1() -> serde_json::Value {
    json!({
        "model_type": "dots1", "architectures": ["Dots1ForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 1
    })
}

/// Resolves the plan of rank 0 of `n_ranks` for a model with 6 experts.
pub(super) fn of_experts(n_ranks: usize, arguments: &[&str]) -> Result<Plan, String> {
    resolve(config_of_experts(), n_ranks, arguments)
}

fn config_of_experts() -> serde_json::Value {
    json!({
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": false, "initializer_range": 0.02, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true, "router_aux_loss_coef": 0.25
    })
}

fn resolve(config: serde_json::Value, n_ranks: usize, arguments: &[&str]) -> Result<Plan, String> {
    resolve_with(config, Environment { world: WorldInfo::first_of(n_ranks), ..known() }, arguments)
}

fn resolve_with(config: serde_json::Value, environment: Environment, arguments: &[&str]) -> Result<Plan, String> {
    let arguments: Vec<String> = arguments.iter().map(|a| a.to_string()).collect();
    let loaded = Loaded::parse(Path::new("recipes/r.yaml"), BASE.to_owned(), &arguments).unwrap();
    let config = Some(Config::from_json(config).unwrap());
    Plan::resolve(&loaded, &Environment { config, ..environment }).map_err(|error| error.to_string())
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
    let alone = ["the 1 rank of a pipeline stage cannot be divided by 2", "start the ranks that the recipe needs"];
    refused_with_experts(1, &["expert_parallel_size=2"], &alone);
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
    assert!(
        message.contains(
            "tensor_parallel_size: the attention of layer 0 cannot be split over 2 tensor parallel ranks: the QK norm"
        ),
        "{message}"
    );
}

#[test]
fn coefficients_of_router_losses_come_from_the_model_or_the_recipe() {
    let balancing = (LoadBalancing, 0.25);
    assert_eq!(losses(&[]), [balancing]);
    assert_eq!(losses(&["moe.aux_loss_coeff=0.5", "moe.z_loss_coeff=1e-3"]), [(LoadBalancing, 0.5), (Z, 1e-3)]);
    assert_eq!(losses(&["moe.aux_loss_coeff=0"]), []);
    // Three experts per token over two layers: transformers' loss of a balanced load is 3, and the sum of ours 2.
    let top_3 = |kind: &str| {
        losses(&[kind, "model.hf_config_kwargs={num_experts_per_tok: 3}"]).iter().map(|(_, c)| *c).collect::<Vec<_>>()
    };
    assert_eq!(top_3("moe.router_load_balancing_type=aux_loss"), [0.25 * 3.0 / 2.0]);
    assert_eq!(top_3("moe.router_load_balancing_type=transformers_aux_loss"), [0.25]);
    assert_eq!(losses(&["model.peft_config={peft_type: LORA, r: 4, target_modules: all-linear}"]), []);
    refused_with_experts(1, &["moe.aux_loss_coeff=-1"], &["moe.aux_loss_coeff: expected at least 0, found -1"]);
    let (large, most) = ("moe.aux_loss_coeff=1e300", "expected at most 3.4e38, the largest f32, found 1e300");
    refused_with_experts(1, &[large], &[&format!("moe.aux_loss_coeff: {most}")]);
    let list = ["moe.router_load_balancing_type=[aux_loss, seq_aux_loss]", "moe.aux_loss_coeff=[1, 1e39]"];
    refused_with_experts(1, &list, &["moe.aux_loss_coeff: expected at most 3.4e38", "found 1e39"]);
    refused_with_experts(1, &["moe.z_loss_coeff=1e39"], &["moe.z_loss_coeff: expected at most 3.4e38", "found 1e39"]);
    assert_eq!(losses(&["moe.aux_loss_coeff=0", "moe.z_loss_coeff=3.4e38"]), [(Z, 3.4e38)]);
    assert_eq!(of_experts(1, &[]).unwrap().moe.unwrap().n_layers, 2);
}

/// Returns the losses of routers with their coefficients.
fn losses(arguments: &[&str]) -> Vec<(RouterLoss, f64)> {
    let moe = of_experts(1, arguments).unwrap().moe.unwrap();
    moe.losses.iter().map(|term| (term.loss, term.coefficient)).collect()
}

#[test]
fn load_balancing_types_are_megatrons() {
    let of_type = |kind: &str| losses(&[&format!("moe.router_load_balancing_type={kind}")]);
    assert_eq!(of_type("aux_loss"), [(LoadBalancing, 0.25)]);
    assert_eq!(of_type("seq_aux_loss"), [(SequenceLoadBalancing, 0.25)]);
    assert_eq!(of_type("global_aux_loss"), [(GlobalLoadBalancing, 0.25)]);
    assert_eq!(of_type("transformers_aux_loss"), [(TransformersLoadBalancing, 0.25)]);
    assert_eq!(of_type("none"), []);
    let lists = ["moe.router_load_balancing_type=[global_aux_loss, aux_loss]", "moe.aux_loss_coeff=[0.5, 1e-2]"];
    assert_eq!(losses(&lists), [(GlobalLoadBalancing, 0.5), (LoadBalancing, 0.01)]);
    assert_eq!(of_type("[aux_loss]"), [(LoadBalancing, 0.25)], "a list of one has the model's coefficient");
    let sinkhorn = of_experts(1, &["moe.router_load_balancing_type=sinkhorn"]).unwrap().moe.unwrap();
    assert!(sinkhorn.sinkhorn && sinkhorn.losses.is_empty());
}

#[test]
fn a_negative_coefficient_of_the_model_is_named() {
    let mut config = config_of_experts();
    config["router_aux_loss_coef"] = json!(-1.0);
    let error = resolve(config.clone(), 1, &[]).unwrap_err();
    for part in ["router_aux_loss_coef in the model's config.json is -1", "set moe.aux_loss_coeff to at least 0"] {
        assert!(error.contains(part), "{error}");
    }
    resolve(config, 1, &["moe.aux_loss_coeff=0"]).unwrap();
    refused_with_experts(1, &["moe.aux_loss_coeff=-2"], &["moe.aux_loss_coeff: expected at least 0, found -2"]);
}

#[test]
fn contradictory_load_balancing_keys_are_refused() {
    let kind = |kind: &str| format!("moe.router_load_balancing_type={kind}");
    for list in ["[]", "[aux_loss, aux_loss]", "[aux_loss, none]", "[sinkhorn]"] {
        refused_with_experts(1, &[&kind(list)], &["expected a list of different losses"]);
    }
    let two = kind("[aux_loss, seq_aux_loss]");
    refused_with_experts(
        1,
        &[&two],
        &["names 2 losses, and there are 0 coefficients", "set moe.aux_loss_coeff to a list of 2"],
    );
    refused_with_experts(1, &[&two, "moe.aux_loss_coeff=[1]"], &["names 2 losses, and there are 1 coefficients"]);
    let empty = ["moe.aux_loss_coeff=[]"];
    refused_with_experts(1, &empty, &["names one loss, and there are 0 coefficients", "give one number"]);
    for none in ["none", "sinkhorn"] {
        refused_with_experts(1, &[&kind(none), "moe.aux_loss_coeff=0.1"], &["moe.aux_loss_coeff", "names no loss"]);
    }
    let refused = resolve(dots1(), 1, &[&kind("sinkhorn")]).unwrap_err();
    assert!(refused.contains("sinkhorn ignores the expert biases"), "{refused}");
}

#[test]
fn expert_biases_are_updated_by_default_from_random_weights() {
    let rate = |arguments: &[&str]| resolve(dots1(), 1, arguments).map(|plan| plan.moe.unwrap().bias_update_rate);
    let random = "model.type=random-weight-hf";
    assert_eq!(rate(&[]), Ok(0.0));
    assert_eq!(rate(&[random]), Ok(1e-3));
    assert_eq!(rate(&["moe.router_bias_update_rate=0.5"]), Ok(0.5));
    assert_eq!(rate(&[random, "moe.router_bias_update_rate=0"]), Ok(0.0));
    let adapter = "model.peft_config={peft_type: LORA, r: 4, target_modules: all-linear}";
    assert_eq!(rate(&[adapter]), Ok(0.0));
    let refused = rate(&[adapter, "moe.router_bias_update_rate=0.5"]).unwrap_err();
    assert!(refused.contains("an adapter cannot store the updated biases"), "{refused}");
    refused_with_experts(1, &["moe.router_bias_update_rate=0.5"], &["the routers of this model have no expert bias"]);
}

#[test]
fn capacities_and_jitter_are_checked() {
    let settings = |arguments: &[&str]| of_experts(1, arguments).unwrap().moe.unwrap().settings();
    assert_eq!((settings(&[]).capacity, settings(&[]).input_jitter_eps), (None, 0.0));
    let capacity = |policy| Some(ExpertCapacity { factor: 1.5, policy });
    let factor = "moe.expert_capacity_factor=1.5";
    assert_eq!(settings(&[factor]).capacity, capacity(DropPolicy::Weights));
    assert_eq!(settings(&[factor, "moe.token_drop_policy=position"]).capacity, capacity(DropPolicy::Position));
    assert_eq!(settings(&["moe.input_jitter_eps=0.01"]).input_jitter_eps, 0.01);
    refused_with_experts(1, &["moe.expert_capacity_factor=0"], &["expected a number above 0, found 0"]);
    refused_with_experts(1, &["moe.token_drop_policy=probs"], &["no token is dropped without"]);
    let padding = |arguments: &[&str]| of_experts(1, arguments).unwrap().moe.unwrap().padded_capacity_factor();
    let pads = "moe.pad_expert_input_to_capacity=true";
    assert_eq!((padding(&[factor]), padding(&[factor, pads])), (None, Some(1.5)));
    assert_eq!(padding(&["moe.pad_expert_input_to_capacity=false"]), None);
    let no_capacity = ["experts have no capacity without moe.expert_capacity_factor", "set moe.expert_capacity_factor"];
    refused_with_experts(1, &[pads], &no_capacity);
    refused_with_experts(1, &["moe.input_jitter_eps=1"], &["moe.input_jitter_eps: expected 0 to 0.99, found 1"]);
}

#[test]
fn the_router_dtype_has_the_names_of_megatron_and_of_model_dtypes() {
    let plan = |arguments: &[&str]| of_experts(1, arguments).unwrap().moe.unwrap();
    assert_eq!(plan(&[]).settings().dtype, RouterDtype::F32);
    for (names, dtype) in
        [(["fp32", "f32", "float32"], RouterDtype::F32), (["fp64", "f64", "float64"], RouterDtype::F64)]
    {
        for name in names {
            let plan = plan(&[&format!("moe.router_dtype={name}")]);
            assert_eq!(plan.settings().dtype, dtype);
            // A resume compares this value.
            assert_eq!(json!(plan)["dtype"], names[0]);
        }
    }
    let set = ["moe={router_dtype: fp64, z_loss_coeff: 0.1, expert_capacity_factor: 1, input_jitter_eps: 0.1}"];
    let evaluation = plan(&set).settings().of_evaluation();
    assert_eq!(evaluation, RouterSettings { dtype: RouterDtype::F64, ..RouterSettings::default() });
}

#[test]
fn a_run_records_or_replays_experts_of_routers() {
    let planned = |arguments: &[&str]| of_experts(1, arguments).unwrap().moe.unwrap().routing_replay;
    let (record, replay) = ("moe.routing_replay.record=a/b", "moe.routing_replay.replay=c");
    assert_eq!(planned(&[]), None);
    assert_eq!(planned(&["moe.routing_replay={}"]), None);
    assert_eq!(planned(&[record]), Some(RoutingReplayPlan::Record("a/b".into())));
    assert_eq!(planned(&[replay]), Some(RoutingReplayPlan::Replay("c".into())));
    refused_with_experts(1, &[record, replay], &["moe.routing_replay: record and replay exclude each other"]);
    refused_with_experts(1, &["moe.routing_replay.replay=\"\""], &["moe.routing_replay.replay: expected a folder"]);
    let sinkhorn = "moe.router_load_balancing_type=sinkhorn";
    refused_with_experts(
        1,
        &[record, sinkhorn],
        &["moe.routing_replay.record: the experts do not come from the routers"],
    );
    let forced = "moe.benchmark.router_force_load_balancing=true";
    refused_with_experts(1, &[replay, forced], &["do not come from the routers with moe.benchmark", "remove one"]);
}

#[test]
fn a_benchmark_saves_nothing() {
    let forced = |argument: &str| {
        let plan = of_experts(1, &[argument]).unwrap();
        assert!(plan.checkpoints.is_empty() && plan.notes.iter().any(|note| note.starts_with("BENCHMARK")));
        plan.moe.unwrap().settings().forced_load
    };
    assert_eq!(forced("moe.benchmark.router_force_load_balancing=true"), ForcedExpertLoad::Random);
    assert_eq!(forced("moe.benchmark.router_force_biased=2"), ForcedExpertLoad::Biased { std: 2.0 });
    let off = of_experts(1, &["moe.benchmark.router_force_load_balancing=false"]).unwrap();
    assert_eq!(off.moe.unwrap().settings().forced_load, ForcedExpertLoad::None);
    let saves = ["moe.benchmark.router_force_biased=2", "checkpoint=[{output_dir: saves}]"];
    refused_with_experts(1, &saves, &["the model is not for use"]);
    of_experts(1, &["moe.benchmark.router_force_biased=2", "checkpoint=none"]).unwrap();
    let both = ["moe.benchmark={router_force_biased: 2, router_force_load_balancing: true}"];
    refused_with_experts(1, &both, &["exclude each other"]);
    refused_with_experts(1, &["moe.benchmark.router_force_biased=0"], &["expected a number above 0, found 0"]);
}

#[test]
fn an_adapter_on_the_routers_trains_them_with_the_models_coefficient() {
    let of = |peft_config: &str| losses(&[&format!("model.peft_config={{peft_type: LORA, r: 4, {peft_config}}}")]);
    assert_eq!(of("target_parameters: [mlp.gate.weight]"), [(LoadBalancing, 0.25)]);
    assert_eq!(of("target_modules: [q_proj, mlp.gate]"), [(LoadBalancing, 0.25)]);
    assert_eq!(of("target_parameters: [mlp.experts.down_proj]"), []);
}

#[test]
fn an_adapter_that_leaves_experts_and_routers_frozen_is_noted_once() {
    let notes = |arguments: &[&str]| {
        let notes = of_experts(1, arguments).unwrap().notes;
        notes.into_iter().filter(|note| note.contains("routed experts and routers frozen")).collect::<Vec<_>>()
    };
    let adapter = |targets: &str| format!("model.peft_config={{peft_type: LORA, r: 4, {targets}}}");
    let all_linear = adapter("target_modules: all-linear");
    let found = notes(&[&all_linear]);
    assert_eq!(found.len(), 1, "{found:?}");
    for part in ["no router loss is added", "model.peft_config.target_parameters: [mlp.experts.gate_up_proj"] {
        assert!(found[0].contains(part), "{part} is not in {found:?}");
    }
    let with_loss = notes(&[&all_linear, "moe.aux_loss_coeff=0.01"]);
    assert!(with_loss[0].contains("the router losses train no router"), "{with_loss:?}");
    for targets in ["target_parameters: [mlp.gate.weight]", "target_parameters: [mlp.experts.down_proj]"] {
        assert_eq!(notes(&[&adapter(targets)]), [""; 0], "{targets}");
    }
    assert_eq!(notes(&[]), [""; 0]);
}

#[test]
fn a_plan_of_experts_lists_the_parameters_that_a_token_uses() {
    let facts = of_experts(1, &[]).unwrap().facts();
    // 6 experts of 3 x 64 x 32 in 2 layers, of which a token uses 2.
    let unused = 2 * 4 * 3 * 64 * 32;
    let number = |text: &str| text.replace(',', "").parse::<usize>().unwrap();
    let (total, rest) = facts[0].1.split_once(", active: ").unwrap();
    let (active, trained) = rest.split_once(", trained: ").unwrap();
    assert_eq!((facts[0].0, trained), ("parameters", "all"));
    assert_eq!(number(active), number(total) - unused, "{}", facts[0].1);
}

#[test]
fn dropout_of_adapters_of_parameters_is_refused_as_by_peft() {
    let argument =
        |dropout, targets| format!("model.peft_config={{peft_type: LORA, lora_dropout: {dropout}, {targets}}}");
    for targets in ["target_parameters: [experts.down_proj]", "target_parameters: [mlp.gate.weight]"] {
        let want = ["model.peft_config: PEFT refuses lora_dropout with target_parameters", "set lora_dropout to 0"];
        refused_with_experts(1, &[&argument("0.1", targets)], &want);
        of_experts(1, &[&argument("0.0", targets)]).unwrap();
    }
    for targets in ["target_modules: [up_proj]", "target_modules: [gate]", "target_modules: all-linear"] {
        of_experts(1, &[&argument("0.1", targets)]).unwrap();
    }
}

#[test]
fn an_adapter_refuses_router_keys_that_it_cannot_store() {
    let sigmoid = "model.hf_config_kwargs={moe_router_score_function: sigmoid}";
    let lora = "model.peft_config={peft_type: LORA, target_modules: [q_proj]}";
    let want = ["model.hf_config_kwargs: an adapter cannot store moe_router_score_function", "config.json"];
    refused_with_experts(1, &[sigmoid, lora], &want);
    let notes = of_experts(1, &[sigmoid]).unwrap().notes;
    assert!(
        notes.iter().any(|note| note.contains("transformers does not read moe_router_score_function")),
        "{notes:?}"
    );
    let bias = of_experts(1, &[sigmoid, "moe.router_bias_update_rate=0.01"]).unwrap_err();
    assert!(bias.contains("moe.router_bias_update_rate"), "{bias}");
    let both = "model.hf_config_kwargs={moe_router_score_function: sigmoid, moe_router_enable_expert_bias: true}";
    let rate = of_experts(1, &[both]).unwrap().moe.unwrap().bias_update_rate;
    assert_eq!(rate, 1e-3, "the weights are initialized randomly");
}

/// The model has 2 layers, 2 experts per token and the coefficient 0.25.
#[test]
fn a_layer_frequency_counts_the_layers_with_experts() {
    let freq = |freq: &str| format!("model.hf_config_kwargs={{moe_layer_freq: {freq}}}");
    let coefficient = |arguments: &[&str]| losses(arguments)[0].1;
    assert_eq!((coefficient(&[]), coefficient(&[&freq("2")])), (0.25, 0.5));
    let layers =
        |argument: &str| of_experts(1, &[argument]).unwrap().model.config.unwrap().moe().unwrap().layers.clone();
    assert_eq!(layers(&freq("2")), [true, false]);
    assert_eq!(layers(&freq("[0, 1]")), [false, true]);
    assert_eq!(layers(&freq("'[0]*1+[1]*1'")), [false, true], "a text of Megatron-LM");
    assert_eq!(layers(&freq("'2'")), [true, false]);
    refused_with_experts(
        1,
        &[&freq("'([1]*3+[0]*1'")],
        &["model.hf_config_kwargs", "`moe_layer_freq`: column 13 of \"([1]*3+[0]*1\": expected"],
    );
    refused_with_experts(1, &[&freq("[1]")], &["model.hf_config_kwargs", "moe_layer_freq", "1 entries for 2 layers"]);
    // MTP layers have experts if the last layer has.
    let n_layers = |freq: &str| of_experts(1, &["model.mtp_num_layers=3", freq]).unwrap().moe.unwrap().n_layers;
    assert_eq!([freq("[0, 1]"), freq("[1, 0]")].map(|freq| n_layers(&freq)), [4, 1]);
    let lora = "model.peft_config={peft_type: LORA, target_modules: [q_proj]}";
    let on_input = "moe_apply_probs_on_input: true, num_experts_per_tok: 1, norm_topk_prob: false";
    for key in [freq("2"), format!("model.hf_config_kwargs={{{on_input}}}")] {
        refused_with_experts(
            1,
            &[&key, lora],
            &["model.hf_config_kwargs: an adapter cannot store moe_", "config.json"],
        );
    }
}

#[test]
fn a_misspelt_parameter_of_experts_is_refused_with_the_nearest() {
    let argument = "model.peft_config={peft_type: LORA, target_parameters: [experts.down_prj]}";
    refused_with_experts(1, &[argument], &["target_parameters", "did you mean `experts.down_proj`?"]);
}

#[test]
fn keys_of_experts_need_a_model_with_experts() {
    for argument in [
        "arctic_moe=true",
        "expert_parallel_size=2",
        "moe.aux_loss_coeff=0.1",
        "moe.z_loss_coeff=0.1",
        "moe.router_bias_update_rate=0.1",
        "moe.router_load_balancing_type=none",
        "moe.expert_capacity_factor=1",
        "moe.token_drop_policy=probs",
        "moe.pad_expert_input_to_capacity=true",
        "moe.input_jitter_eps=0.1",
        "moe.router_dtype=fp64",
        "moe.benchmark.router_force_biased=1",
        "expert_tensor_parallel_size=2",
        "moe.token_dispatcher_type=allgather",
        "model.experts_implementation=cublas",
        "moe.routing_replay.record=a",
    ] {
        refused(&[argument], &[&format!("argument `{argument}`:"), "this model has no experts"]);
    }
    of_experts(1, &["arctic_moe=true"]).unwrap();
}

/// The recipe loads the model, unless its type is random-weight-hf or an override changes the layers.
#[test]
fn a_model_without_experts_in_any_layer_is_refused_unless_it_is_pretrained_and_trained_as_a_dense_one() {
    let (sparse_step, first_dense) = ("decoder_sparse_step and mlp_only_layers", "first_k_dense_replace");
    let dense = |key: &str, value: serde_json::Value| {
        let mut config = if key == first_dense { dots1() } else { config_of_experts() };
        config[key] = value;
        config
    };
    for (config, keys) in [
        (dense("decoder_sparse_step", json!(3)), sparse_step),
        (dense("mlp_only_layers", json!([0, 1])), sparse_step),
        (dense(first_dense, json!(2)), first_dense),
    ] {
        let plan = resolve(config.clone(), 1, &[]).unwrap();
        let note = format!("no layer has experts by {keys} of config.json: the model is trained as a dense one");
        assert!(plan.moe.is_none() && plan.notes.contains(&note), "{:?}", plan.notes);
        for key in ["moe.z_loss_coeff", "moe.aux_loss_coeff"] {
            let error = resolve(config.clone(), 1, &[&format!("{key}=0.1")]).unwrap_err();
            let want = format!("{key}: no layer has experts by {keys} of config.json");
            assert!(error.contains(&want) && error.contains("remove the key"), "{error}");
        }
        let error = resolve(config, 1, &["model.type=random-weight-hf"]).unwrap_err();
        let want = format!("model.name_or_path: no layer has experts by {keys}");
        assert!(error.contains(&want) && error.contains("number of experts to 0"), "{error}");
    }
    let step = "model.hf_config_kwargs={decoder_sparse_step: 3}";
    refused_with_experts(1, &[step], &["model.hf_config_kwargs: no layer has experts by decoder_sparse_step"]);
    of_experts(1, &["model.hf_config_kwargs={decoder_sparse_step: 2}", "moe.z_loss_coeff=0.1"]).unwrap();
    assert!(of_experts(1, &["model.hf_config_kwargs={num_experts: 0}"]).unwrap().moe.is_none());
}

/// The experts of a rank are 6 / 2 matrices of 2 * 32 and of 64 rows, of which 128 have one scale.
#[test]
fn ranks_must_not_split_the_blocks_of_experts_in_fp8() {
    let base = ["model.quantize_base=fp8", "model.peft_config={r: 4, target_modules: [q_proj]}"];
    let splits = |key: &'static str| [&base[..], &[key]].concat();
    let want = ["expert_parallel_size: model.quantize_base has a scale for each 128 rows", "192 and 192 rows"];
    refused_with_experts(2, &splits("expert_parallel_size=2"), &want);
    let want = ["expert_tensor_parallel_size: model.quantize_base", "16 of the intermediate size", "use 1, or remove"];
    refused_with_experts(2, &splits("expert_tensor_parallel_size=2"), &want);
    of_experts(3, &splits("expert_parallel_size=3")).unwrap();
    of_experts(2, &["expert_parallel_size=2", base[1]]).unwrap();
}

#[test]
fn experts_by_cublas_need_a_gpu_and_16_bits() {
    let cublas = "model.experts_implementation=cublas";
    let bf16 = of_experts(1, &[cublas, "model.dtype=bf16"]).unwrap();
    assert_eq!(bf16.model.experts_implementation, GroupedGemmImpl::Cublas);
    let refused = |argument: &str| of_experts(1, &[cublas, argument]).unwrap_err().to_string();
    assert!(refused("device=cpu").contains("cublas needs a GPU, but device is cpu"));
    assert!(refused("model.dtype=f32").contains("cublas supports 16-bit dtypes only, but model.dtype is f32"));
    let narrow = of_experts(8, &[cublas, "model.dtype=bf16", "expert_tensor_parallel_size=8"]).unwrap_err();
    assert!(narrow.contains("cublas needs sizes of multiples of 8, but a rank's experts are 64 x 4"), "{narrow}");
    assert!(narrow.contains("use fused, the default"), "{narrow}");
    let here = |missing_gpu: Option<&str>, arguments: &[&str]| {
        let environment = Environment { missing_gpu: missing_gpu.map(str::to_owned), ..known() };
        resolve_with(config_of_experts(), environment, arguments)
    };
    for device in [&[cublas][..], &[cublas, "device=auto"], &[cublas, "device=cuda"]] {
        let error = here(Some("there is no driver"), device).unwrap_err();
        assert!(error.contains(&format!("argument `{cublas}`")), "{error}");
        assert!(error.contains("model.experts_implementation: cublas needs a GPU: there is no driver"), "{error}");
        assert!(error.contains("use fused, the default"), "{error}");
        here(None, device).unwrap();
    }
    here(Some("there is no driver"), &[]).unwrap();
}

#[test]
fn experts_by_cutlass_need_a_gpu_and_bf16() {
    let cutlass = "model.experts_implementation=cutlass";
    let bf16 = of_experts(1, &[cutlass, "model.dtype=bf16"]).unwrap();
    assert_eq!(bf16.model.experts_implementation, GroupedGemmImpl::Cutlass);
    let refused = |arguments: &[&str]| of_experts(8, &[&[cutlass], arguments].concat()).unwrap_err().to_string();
    for (argument, want) in [
        ("device=cpu", "cutlass needs a GPU, but device is cpu"),
        ("model.dtype=f32", "cutlass supports bf16 only, but model.dtype is f32"),
        ("model.dtype=fp16", "cutlass supports bf16 only, but model.dtype is fp16"),
    ] {
        let error = refused(&[argument]);
        assert!(error.contains(want) && error.contains("use fused, the default"), "{error}");
    }
    let narrow = refused(&["model.dtype=bf16", "expert_tensor_parallel_size=8"]);
    assert!(narrow.contains("cutlass needs sizes of multiples of 8, but a rank's experts are 64 x 4"), "{narrow}");
    assert!(narrow.contains("use fused, the default"), "{narrow}");
}

#[test]
fn the_implementation_of_experts_is_a_setting_of_models_with_experts() {
    let shown = |plan: Plan| {
        let table = plan.table(SettingsFilter::All);
        table.lines().find(|line| line.contains("experts_implementation")).map(str::to_owned)
    };
    let row = |arguments: &[&str]| shown(of_experts(1, arguments).unwrap()).unwrap();
    let default = row(&[]);
    assert!(default.contains(" fused ") && default.ends_with("default"), "{default}");
    for name in ["auto", "cublas", "cutlass"] {
        let named = row(&[&format!("model.experts_implementation={name}")]);
        assert!(named.contains(&format!(" {name} ")) && named.ends_with("argument"), "{named}");
    }
    assert_eq!(shown(super::resolve(BASE, &[]).unwrap()), None);
}

#[test]
fn keys_of_arctic_training_without_effect_are_noted() {
    let keys = ["enable_arctic_moe_custom_optimization=true", "enable_routing_replay=true"];
    let notes = of_experts(1, &keys).unwrap().notes;
    for key in keys {
        let name = key.split('=').next().unwrap();
        assert!(notes.iter().any(|note| note.contains(&format!("{name} has no effect"))), "{notes:?}");
    }
    assert!(notes.iter().any(|note| note.contains("moe.routing_replay replays those of another run")), "{notes:?}");
}

#[test]
fn adam_for_experts_is_adamw() {
    for (kind, dense) in [("fused_adam_moe", "fused_adam"), ("cpu_adam_moe", "cpu_adam")] {
        let optimizer = |kind| of_experts(1, &[&format!("optimizer.type={kind}")]).unwrap().optimizer;
        assert_eq!(optimizer(kind), optimizer(dense));
    }
}
