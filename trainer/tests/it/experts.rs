//! Runs of a mixture of experts.

use crate::support::{Run, stderr};

#[test]
fn a_resume_logs_changed_keys_of_experts() {
    let run = Run::of_experts();
    run.train_ok(&["exit_iteration=3", "moe.aux_loss_coeff=0.01", "moe.expert_capacity_factor=2"]);
    let changes = ["moe.aux_loss_coeff=0.02", "moe.z_loss_coeff=0.001", "moe.token_drop_policy=position"];
    let keys = [&changes[..], &["moe.expert_capacity_factor=2", "exit_iteration=4"]].concat();
    let log = stderr(&run.train(&keys));
    run.assert_resumed();
    for change in
        ["0.01 in the checkpoint, 0.02 now", "moe.drop_policy: \"probs\" in the checkpoint, \"position\" now", "z_loss"]
    {
        assert!(log.contains(change), "{change}: {log}");
    }
    assert!(!log.contains("capacity_factor:"), "{log}");
}

/// Experts compute at most half of a balanced load. So at least about half of the selections are dropped.
#[test]
fn metrics_show_the_selections_that_a_capacity_drops() {
    let run = Run::of_experts();
    run.train_ok(&["exit_iteration=3", "moe.expert_capacity_factor=0.5"]);
    let records = run.metrics();
    let loads: Vec<_> = records.iter().map(|record| &record["expert_load"]).filter(|load| load.is_object()).collect();
    assert_eq!(loads.len(), 3);
    for load in loads {
        let layers = load["layers"].as_array().unwrap();
        let dropped: Vec<f64> = layers.iter().map(|layer| layer["dropped"].as_f64().unwrap()).collect();
        assert!(!dropped.is_empty() && dropped.iter().all(|share| (0.4..1.0).contains(share)), "{load}");
        let mean = dropped.iter().sum::<f64>() / dropped.len() as f64;
        assert!((load["dropped"].as_f64().unwrap() - mean).abs() < 1e-9, "{load}");
    }
}

/// Rows padded to one length have the losses and loads of the rows without padding.
#[test]
fn pad_tokens_change_neither_the_losses_of_routers_nor_the_load() {
    let records = |pad_to| {
        let run = Run::of_experts();
        let losses = "moe.router_load_balancing_type=[aux_loss, seq_aux_loss, global_aux_loss, transformers_aux_loss]";
        let coefficients = "moe.aux_loss_coeff=[0.1, 0.1, 0.1, 0.1]";
        run.train_ok(&["exit_iteration=2", losses, coefficients, "moe.z_loss_coeff=0.01", pad_to]);
        run.metrics().into_iter().filter(|record| record["expert_load"].is_object()).collect::<Vec<_>>()
    };
    let (plain, padded) = (records("data.pad_to=none"), records("data.pad_to=max_length"));
    assert_eq!((plain.len(), padded.len()), (2, 2));
    for (plain, padded) in plain.iter().zip(&padded) {
        assert!(plain["seqlen"].as_f64() < padded["seqlen"].as_f64(), "nothing was padded");
        assert_eq!(plain["tokens"], padded["tokens"]);
        assert_eq!(plain["auxiliary_losses"].as_object().unwrap().len(), 5);
        for (name, loss) in plain["auxiliary_losses"].as_object().unwrap() {
            let (plain, padded) = (loss.as_f64().unwrap(), padded["auxiliary_losses"][name].as_f64().unwrap());
            assert!((plain - padded).abs() <= 1e-4 * plain, "{name}: {plain} and {padded}");
        }
        for key in ["max_over_mean", "entropy", "dropped"] {
            let [plain, padded] = [plain, padded].map(|record| record["expert_load"][key].as_f64().unwrap());
            assert!((plain - padded).abs() <= 1e-4 * plain.max(1.0), "{key}: {plain} and {padded}");
        }
    }
}

#[test]
fn an_estimate_says_that_it_assumes_balanced_experts() {
    let run = Run::of_experts();
    let table = |arguments: &[&str]| {
        let output = run.command("estimate", &[&["--ranks", "2"], arguments].concat()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let note = "assumes balanced experts";
    let (whole, divided) = (table(&[]), table(&["expert_parallel_size=2"]));
    assert!(divided.contains(note) && !whole.contains(note), "{whole}\n{divided}");
}

/// Tiles compute each row as without tiles; gradients of weights are sums in another order.
#[test]
fn a_run_with_tiles_of_experts_has_the_losses_of_one_without() {
    let (plain, tiled) = (Run::of_experts(), Run::of_experts());
    plain.train_ok(&[]);
    tiled.train_ok(&["tiled_mlp_compute=true"]);
    for (plain, tiled) in plain.losses().iter().zip(tiled.losses()) {
        assert!((plain - tiled).abs() < 1e-4 * plain, "{plain} {tiled}");
    }
    assert!(plain.exported() != tiled.exported(), "nothing was tiled");
}

#[test]
fn weights_on_the_inputs_of_experts_are_trained_and_exported() {
    let run = Run::of_experts();
    run.edit("num_experts_per_tok: 2", "num_experts_per_tok: 1\n    moe_apply_probs_on_input: true");
    run.edit("norm_topk_prob: true", "norm_topk_prob: false");
    run.train_ok(&[]);
    let losses = run.losses();
    assert!(losses[23] < 0.8 * losses[0], "{losses:?}");
    let config = std::fs::read_to_string(run.export_folder().join("config.json")).unwrap();
    assert!(config.contains("\"moe_apply_probs_on_input\": true"), "{config}");
}

/// Keys of Megatron-LM's router: the model trains, resumes to the bit, exports its biases, and is read again.
#[test]
fn a_router_that_the_family_does_not_have_is_trained_resumed_and_exported() {
    let router = "norm_topk_prob: true\n    moe_router_score_function: sqrtsoftplus\n    \
                  moe_router_enable_expert_bias: true\n    moe_router_topk_scaling_factor: 1.5\n    \
                  moe_router_num_groups: 4\n    moe_router_group_topk: 2";
    let make = || {
        let run = Run::of_experts();
        run.edit("norm_topk_prob: true", router);
        run
    };
    let (whole, resumed, plain) = (make(), make(), Run::of_experts());
    let log = stderr(&whole.train(&[]));
    assert!(log.contains("transformers does not read moe_router_score_function"), "{log}");
    resumed.train_ok(&["exit_iteration=11"]);
    resumed.train_ok(&[]);
    resumed.assert_resumed();
    plain.train_ok(&[]);
    let losses = whole.losses();
    assert!(losses[23] < 0.8 * losses[0], "{losses:?}");
    assert_eq!(losses, resumed.losses());
    assert_eq!(whole.exported(), resumed.exported());
    assert_ne!(losses[0], plain.losses()[0]);
    let tensors = candle_core::safetensors::load_buffer(&whole.exported(), &candle_core::Device::Cpu).unwrap();
    let bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"].to_vec1::<f32>().unwrap();
    assert!(bias.iter().any(|bias| *bias != 0.0), "{bias:?}");
    check_exports(&whole, "llama.cpp has the router of qwen3moe without this key");
}

/// Rounding to bf16 changes the experts of tokens near ties of their router. The check takes those of the source, and the logits
/// stay as near as in a dense model. With other experts the norm is above 0.05.
#[test]
fn an_export_of_tokens_near_ties_of_their_routers_is_accepted() {
    let run = Run::of_experts();
    run.train_ok(&["train_iters=1", "model.config.initializer_range=0.5"]);
    let path = run.export_folder().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &candle_core::Device::Cpu).unwrap();
    for (_, router) in tensors.iter_mut().filter(|(name, _)| name.ends_with("mlp.gate.weight")) {
        *router = (&*router * 1e-3).unwrap();
    }
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.arg("export").arg(run.export_folder()).args(["--dtype", "bf16", "--output"]).arg(run.path().join("bf16"));
    let output = command.env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let norm = text.split_once("relative norm ").and_then(|(_, rest)| rest.split(',').next()?.parse::<f64>().ok());
    assert!(norm.unwrap() < 0.02, "{text}");
}

/// Exports a trained model again. A model that transformers does not read is exported with a warning, and GGUF refuses it.
#[track_caller]
fn check_exports(run: &Run, refusal: &str) {
    let export = |format: &str, output: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.arg("export").arg(run.export_folder()).args(["--format", format, "--output"]);
        command.arg(run.path().join(output)).env("HF_HUB_OFFLINE", "1").output().unwrap()
    };
    // The folder is read again: its logits are compared with those of a second export.
    let output = export("safetensors", "again");
    assert!(output.status.success() && stderr(&output).contains("transformers does not read"), "{}", stderr(&output));
    let refused = stderr(&export("gguf-q8_0", "gguf"));
    assert!(refused.contains(refusal), "{refused}");
}

/// A pattern that no key of the family expresses: the model trains, resumes to the bit, and is read again.
#[test]
fn a_pattern_of_layers_is_trained_resumed_and_exported() {
    let make = || {
        let run = Run::of_experts();
        run.edit("Qwen3MoeForCausalLM", "MixtralForCausalLM");
        run.edit("model_type: qwen3_moe", "model_type: mixtral\n    moe_layer_freq: [0, 1]");
        run.edit("    moe_intermediate_size: 16\n", "");
        run
    };
    let (whole, resumed) = (make(), make());
    let log = stderr(&whole.train(&[]));
    assert!(log.contains("transformers does not read moe_layer_freq"), "{log}");
    resumed.train_ok(&["exit_iteration=11"]);
    resumed.train_ok(&[]);
    resumed.assert_resumed();
    let losses = whole.losses();
    assert!(losses[23] < 0.8 * losses[0], "{losses:?}");
    assert_eq!(losses, resumed.losses());
    assert_eq!(whole.exported(), resumed.exported());
    let loads = whole.metrics().into_iter().map(|record| record["expert_load"]["layers"].clone());
    let loads: Vec<_> = loads.filter_map(|layers| layers.as_array().cloned()).collect();
    assert_eq!(loads.len(), 24);
    assert!(loads.iter().all(|layers| layers.len() == 1 && layers[0]["layer"] == 1), "{loads:?}");
    let tensors = candle_core::safetensors::load_buffer(&whole.exported(), &candle_core::Device::Cpu).unwrap();
    let has = |name: &str| tensors.contains_key(&format!("model.layers.{name}.weight"));
    assert!(has("0.mlp.gate_proj") && has("1.block_sparse_moe.experts.7.w1"), "{:?}", tensors.keys());
    assert!(!has("1.mlp.gate_proj") && !has("0.block_sparse_moe.gate"));
    let config = std::fs::read_to_string(whole.export_folder().join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["moe_layer_freq"], serde_json::json!([0, 1]));
    check_exports(&whole, "`moe_layer_freq`: llama.cpp has experts in every layer of llama");
}

#[test]
fn a_pattern_of_layers_is_that_of_the_keys_of_the_family() {
    let train = |key: &str| {
        let run = Run::of_experts();
        run.edit("norm_topk_prob: true", &format!("norm_topk_prob: true\n    {key}"));
        let log = stderr(&run.train(&["exit_iteration=3"]));
        assert!(!log.contains("transformers does not read"), "{log}");
        run.losses()
    };
    let losses = train("moe_layer_freq: 2");
    assert_eq!(losses, train("mlp_only_layers: [1]"));
    assert_eq!(losses, train("moe_layer_freq: ([1] + [0]*1)*1"));
    assert_ne!(losses, train("moe_layer_freq: [0, 1]"));
}

/// A pretrained model whose keys make all layers dense, as transformers reads them, trains as the dense model with its weights.
#[test]
fn a_pretrained_model_without_experts_in_any_layer_is_trained_as_a_dense_one() {
    let dense = Run::of_experts();
    dense.train_ok(&["train_iters=1", "model.hf_config_kwargs={num_experts: 0}"]);
    let model = dense.export_folder();
    let load = |keys: serde_json::Value, arguments: &[&str]| {
        let run = Run::of_experts();
        let path = model.join("config.json");
        let written = std::fs::read_to_string(&path).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&written).unwrap();
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        std::fs::write(&path, config.to_string()).unwrap();
        let name = format!("model={{name_or_path: {}, dtype: f32}}", model.display());
        let output = run.train(&[&[name.as_str(), "train_iters=3"], arguments].concat());
        std::fs::write(&path, written).unwrap();
        (run, output)
    };
    let keys = serde_json::json!({"num_experts": 8, "decoder_sparse_step": 3});
    let (run, output) = load(keys.clone(), &[]);
    let log = stderr(&output);
    assert!(output.status.success() && log.contains("the model is trained as a dense one"), "{log}");
    let (plain, _) = load(serde_json::json!({}), &[]);
    assert_eq!(run.losses(), plain.losses());
    assert!(run.metrics().iter().all(|record| record["expert_load"].is_null()), "no layer has experts");
    let (_, refused) = load(keys, &["moe.z_loss_coeff=0.1"]);
    assert_eq!(refused.status.code(), Some(2));
    let refused = stderr(&refused);
    assert!(refused.contains("moe.z_loss_coeff: no layer has experts by decoder_sparse_step"), "{refused}");
}
