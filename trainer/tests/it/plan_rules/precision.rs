//! FP8 training.

use candlewick_ops::{
    AmaxHistoryPolicy, DelayedScaling, FP8_WEIGHT_FORMAT, Fp8Config, Fp8Formats, Fp8Recipe, Fp8Rounding, ScaleRule,
    WeightStorage,
};
use trainer::estimate::{Category, DeviceKind, Phase, Setup, estimate_stage};
use trainer::plan::Plan;

use super::{moe::of_experts, plan, ranks::plan_of, refused};

fn config(arguments: &[&str]) -> Option<Fp8Config> {
    plan(arguments).fp8.map(|fp8| fp8.config(0))
}

#[test]
fn recipes_have_the_defaults_of_transformer_engine() {
    assert_eq!(config(&[]), None);
    assert_eq!(config(&["precision.recipe=none"]), None);
    let delayed = DelayedScaling { margin: 0, amax_history_len: 1024, amax_compute: AmaxHistoryPolicy::Max };
    let nearest = Fp8Rounding::Nearest;
    let fp8 = |recipe, formats| Some(Fp8Config { recipe, formats, gradient_rounding: nearest, fake_quantize: false });
    assert_eq!(config(&["precision.recipe=delayed"]), fp8(Fp8Recipe::Delayed(delayed), Fp8Formats::Hybrid));
    let rule = |power_of_two| ScaleRule { power_of_two, amax_epsilon: 0.0 };
    let current = fp8(Fp8Recipe::Current(rule(false)), Fp8Formats::Hybrid);
    assert_eq!(config(&["precision.recipe=current"]), current);
    assert_eq!(config(&["precision.recipe=tensorwise"]), current, "Megatron-LM's name");
    assert_eq!(config(&["precision.recipe=blockwise"]), fp8(Fp8Recipe::Blockwise(rule(true)), Fp8Formats::E4m3));
}

#[test]
fn every_key_reaches_the_engine() {
    let keys =
        ["margin=2", "amax_history_len=16", "amax_compute_algo=most_recent", "format=e4m3", "fake_quantize=true"];
    let keys = keys.map(|key| format!("precision.{key}"));
    let arguments: Vec<&str> =
        ["precision.recipe=delayed"].into_iter().chain(keys.iter().map(String::as_str)).collect();
    let delayed = DelayedScaling { margin: 2, amax_history_len: 16, amax_compute: AmaxHistoryPolicy::MostRecent };
    let want = Fp8Config {
        recipe: Fp8Recipe::Delayed(delayed),
        formats: Fp8Formats::E4m3,
        gradient_rounding: Fp8Rounding::Nearest,
        fake_quantize: true,
    };
    assert_eq!(config(&arguments), Some(want));
    let rule =
        config(&["precision.recipe=current", "precision.power_of_two_scales=true", "precision.amax_epsilon=1e-3"]);
    let want = ScaleRule { power_of_two: true, amax_epsilon: 1e-3 };
    assert_eq!(rule.map(|config| config.recipe), Some(Fp8Recipe::Current(want)));
    let rounding = config(&["precision.recipe=current", "precision.gradient_rounding=stochastic"]);
    assert!(matches!(rounding.unwrap().gradient_rounding, Fp8Rounding::Stochastic { .. }));
}

fn modules(plan: &Plan) -> Vec<String> {
    let model = plan.build_model(plan.model.config.clone().unwrap()).unwrap();
    model.fp8_modules().into_iter().map(|module| module.name).collect()
}

#[test]
fn layers_and_names_are_left_out() {
    let of = |arguments: &[&str]| modules(&plan(&[&["precision.recipe=current"], arguments].concat()));
    let all = of(&[]);
    assert_eq!(all.len() % 7, 0);
    assert_eq!(all[0], "model.layers.0.self_attn.q_proj");
    let filtered = of(&["precision.exclude_modules=[o_proj, layers.0.mlp]"]);
    assert_eq!(filtered.len(), all.len() - all.len() / 7 - 3);
    let first = of(&["precision.first_last_layers_bf16=true", "precision.num_layers_at_end_in_bf16=0"]);
    assert_eq!(first[..], all[7..]);
    assert!(modules(&plan(&[])).is_empty());
}

/// Experts multiply in model.dtype after FP8 rounding, which makes a GPU slower.
#[test]
fn experts_are_quantized_on_a_gpu_only_if_the_recipe_sets_it() {
    let check = |arguments: &[&str], has_experts: bool, n_notes: usize| {
        let plan = of_experts(1, &[&["precision.recipe=current"], arguments].concat()).unwrap();
        assert_eq!(modules(&plan).iter().any(|name| name.contains("experts")), has_experts, "{arguments:?}");
        let notes = plan.notes.iter().filter(|note| {
            note.contains("precision.quantize_experts: routed experts stay in model.dtype")
                && note.contains("set it to true")
        });
        assert_eq!(notes.count(), n_notes, "{arguments:?}: {:?}", plan.notes);
    };
    check(&["device=cpu"], true, 0);
    check(&["device=cuda"], false, 1);
    check(&["device=cuda", "precision.quantize_experts=true"], true, 0);
    check(&["device=cuda", "precision.quantize_experts=false"], false, 0);
    check(&["device=cpu", "precision.quantize_experts=false"], false, 0);
    // A filter that names experts is no typing error there.
    check(&["device=cuda", "precision.exclude_modules=[experts]"], false, 1);
    let dense = ["precision.recipe=current", "precision.quantize_experts=true"];
    refused(&dense, &["precision.quantize_experts", "the model has no routed experts"]);
    refused(&["precision.quantize_experts=true"], &["precision.quantize_experts", "only with precision.recipe"]);
}

#[test]
fn only_the_base_of_an_adapter_is_quantized() {
    let (fp8, lora) = ("model.quantize_base=fp8", "model.peft_config={r: 4, target_modules: all-linear}");
    refused(&[fp8], &["model.quantize_base", "this run trains all weights", "set model.peft_config"]);
    let storages = |arguments: &[&str]| {
        let plan = plan(arguments);
        let model = plan.build_model(plan.model.config.clone().unwrap()).unwrap();
        let units = model.units().iter().flat_map(|unit| &unit.params);
        units.filter(|param| param.storage == WeightStorage::Quantized(&FP8_WEIGHT_FORMAT)).count()
    };
    assert_eq!(storages(&[lora]), 0);
    assert_eq!(storages(&[lora, fp8]), 2 * 7);
}

#[test]
fn keys_without_effect_are_refused() {
    refused(
        &["precision.format=e4m3"],
        &["precision.format", "only with precision.recipe: delayed, current or blockwise"],
    );
    refused(
        &["precision.recipe=current", "precision.margin=1"],
        &["precision.margin", "only with precision.recipe: delayed"],
    );
    let epsilon = ["precision.recipe=delayed", "precision.amax_epsilon=1e-3"];
    refused(&epsilon, &["precision.amax_epsilon", "only with precision.recipe: current or blockwise"]);
    let at_start = ["precision.recipe=current", "precision.num_layers_at_start_in_bf16=2"];
    refused(&at_start, &["no effect without precision.first_last_layers_bf16"]);
    refused(&["precision.num_layers_at_start_in_bf16=2"], &["precision.num_layers_at_start_in_bf16"]);
    let unknown = ["precision.recipe=current", "precision.exclude_modules=[qproj]"];
    refused(&unknown, &["no linear layer or expert has a name with \"qproj\"", "model.layers.0.self_attn.q_proj"]);
    refused(
        &["precision.recipe=current", "precision.exclude_modules=[layers]"],
        &["no linear layer or expert is left"],
    );
    refused(&["precision.fake_quantize=true"], &["precision.fake_quantize", "only with precision.recipe"]);
    let stats = ["precision.recipe=current", "precision.stats_tensors=[weight]"];
    refused(&stats, &["precision.stats_tensors: it has no effect without precision.stats_interval"]);
    let of_modules = |text: &str| {
        let modules = format!("precision.stats_modules=[{text}]");
        let recipe = ["precision.recipe=current", "precision.exclude_modules=[o_proj]", "precision.stats_interval=5"];
        refused(&[&recipe[..], &[&modules]].concat(), &[&format!("no module in FP8 has a name with \"{text}\"")]);
    };
    of_modules("oproj");
    of_modules("o_proj");
    let none = ["precision.recipe=current", "precision.stats_interval=5", "precision.stats_tensors=[]"];
    refused(&none, &["expected at least one of input, weight and grad_output"]);
    for key in ["exclude_slower_modules", "fp8_param_gather"] {
        let (key, stage_3) = (format!("precision.{key}=true"), "deepspeed.zero_optimization.stage=3");
        let fake = ["precision.recipe=current", "precision.fake_quantize=true", &key, stage_3];
        refused(&fake, &["no effect with precision.fake_quantize"]);
    }
    refused(&["precision.recipe=delayed", "precision.amax_history_len=0"], &["expected at least 1, found 0"]);
    let long = ["precision.recipe=delayed", "precision.amax_history_len=1e9"];
    refused(&long, &["precision.amax_history_len: expected at most 65536 steps, found 1000000000"]);
    refused(&["precision.recipe=delayed", "precision.margin=99"], &["expected at most 64, found 99"]);
}

#[test]
fn weights_are_gathered_in_fp8_at_zero_stage_3() {
    let (gather, stage_3) = ("precision.fp8_param_gather=true", "deepspeed.zero_optimization.stage=3");
    let of = |n_ranks, recipe: &str| {
        let plan = plan_of(n_ranks, &[&format!("precision.recipe={recipe}"), gather, stage_3]).unwrap();
        (plan.fp8.unwrap().param_gather, plan.notes.iter().any(|note| note.contains("fp8_param_gather")))
    };
    assert_eq!(["delayed", "current"].map(|recipe| of(2, recipe)), [(true, false); 2]);
    assert_eq!(of(1, "current"), (false, true), "one rank gathers nothing, which is a note");
    assert!(!plan(&["precision.recipe=current", stage_3]).fp8.unwrap().param_gather);
    refused(&[gather, stage_3], &["precision.fp8_param_gather", "only with precision.recipe: delayed or current"]);
    for stage in ["deepspeed.zero_optimization.stage=2", "deepspeed={}"] {
        let want = ["precision.fp8_param_gather: only ZeRO stage 3", "set deepspeed.zero_optimization.stage: 3"];
        refused(&["precision.recipe=current", gather, stage], &want);
    }
    let want = ["fp8_param_gather: ranks divide the 128x128 blocks", "set precision.recipe: current or delayed"];
    refused(&["precision.recipe=blockwise", gather, stage_3], &want);
    let base = ["model.quantize_base=fp8", "model.peft_config={r: 4, target_modules: all-linear}"];
    let want = ["model.quantize_base: fp8 gathers a byte per weight already", "remove one of the keys"];
    refused(&[&base[..], &["precision.recipe=current", gather, stage_3]].concat(), &want);
    refused(&["precision.enable_fsdp_float8_all_gather=true"], &["precision.fp8_param_gather"]);
    refused(&["fp8_param_gather=true"], &["precision.fp8_param_gather"]);
}

/// A layer of the model has 36864 weights of linear layers and 128 of norms, the head 8256.
#[test]
fn gathered_fp8_weights_are_estimated_once() {
    let arguments = ["precision.recipe=current", "deepspeed.zero_optimization.stage=3", "data.eval_sources=[b.jsonl]"];
    let bytes = |more: &[&str]| {
        let plan = plan_of(2, &[&arguments[..], more].concat()).unwrap();
        let estimate = estimate_stage(&Setup::of(&plan, DeviceKind::Gpu).unwrap());
        let of = |phase: Phase, category| {
            estimate.phases.iter().find(|it| it.phase == phase).unwrap().breakdown.of(category)
        };
        [
            (Phase::Step, Category::Exchange),
            (Phase::Step, Category::Fp8Weights),
            (Phase::Evaluation, Category::Exchange),
        ]
        .map(|(phase, category)| of(phase, category))
    };
    let [elements, copies, evaluation] = bytes(&[]);
    assert_eq!(copies, 2 * 2 * 36864, "two units, each with its transposed codes");
    let two_units_in_bf16 = |n: u64| 2 * 2 * n;
    let saved = two_units_in_bf16(36864 + 128) - two_units_in_bf16(8256);
    assert_eq!(bytes(&["precision.fp8_param_gather=true"]), [elements - saved, copies, evaluation]);
}

/// Both layers of the model have 12288 weights of attention and 36864 of experts. Copies of frozen weights outlive a step,
/// unless their scales are set anew after each.
#[test]
fn fp8_copies_of_experts_are_estimated() {
    let bytes = |n_ranks: usize, phase: Phase, arguments: &[&str]| {
        let plan = of_experts(n_ranks, arguments).unwrap();
        let estimate = estimate_stage(&Setup::of(&plan, DeviceKind::Gpu).unwrap());
        estimate.phases.iter().find(|it| it.phase == phase).unwrap().breakdown.of(Category::Fp8Weights)
    };
    let current = "precision.recipe=current";
    let (attention, experts) = (2 * 2 * 12288, 2 * 36864);
    assert_eq!(bytes(1, Phase::Step, &[current]), attention + experts, "transposed codes of linear layers alone");
    assert_eq!(bytes(2, Phase::Step, &[current, "expert_parallel_size=2"]), attention + experts / 2);
    assert_eq!(bytes(1, Phase::Step, &[current, "precision.fake_quantize=true"]), attention / 2 + experts);
    assert_eq!(bytes(1, Phase::Step, &[current, "precision.exclude_modules=[experts]"]), attention);
    assert_eq!(bytes(1, Phase::Optimizer, &[current]), 0);
    let lora = "model.peft_config={r: 4, target_modules: [q_proj]}";
    assert_eq!(bytes(1, Phase::Optimizer, &[current, lora]), attention + experts);
    // The amaxes of 1024 steps and of this one, and the scale, of each operand of 32 matrices.
    let amaxes = 32 * 3 * (1024 + 2) * 4;
    assert_eq!(bytes(1, Phase::Optimizer, &["precision.recipe=delayed", lora]), amaxes);
}

/// A GPU has the transposed codes as well, of a byte per weight.
#[test]
fn stored_codes_that_are_multiplied_have_no_copy() {
    let lora = "model.peft_config={r: 4, target_modules: [q_proj]}";
    let bytes = |device: DeviceKind, recipe: &str, base: &[&str]| {
        let recipe = format!("precision.recipe={recipe}");
        let plan = plan_of(1, &[&[lora, recipe.as_str()][..], base].concat()).unwrap();
        let estimate = estimate_stage(&Setup::of(&plan, device).unwrap());
        estimate.phases.iter().find(|it| it.phase == Phase::Step).unwrap().breakdown.of(Category::Fp8Weights)
    };
    let stored = "model.quantize_base=fp8";
    for (device, copied, shared) in [(DeviceKind::Gpu, 2, 1), (DeviceKind::Cpu, 1, 0)] {
        let of_copies = bytes(device, "blockwise", &[]);
        assert!(of_copies > 0);
        assert_eq!(bytes(device, "blockwise", &[stored]) * copied, of_copies * shared, "{device:?}");
        let exact = "precision.power_of_two_scales=false";
        assert_eq!(bytes(device, "blockwise", &[stored, exact]), of_copies, "{device:?}: other scales");
        assert_eq!(bytes(device, "current", &[stored]), bytes(device, "current", &[]), "{device:?}: a scale for all");
    }
}
