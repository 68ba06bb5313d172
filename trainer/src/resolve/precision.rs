//! Resolution of the section `precision`.

use candlewick_model::Config;

use super::backend::is_on_gpu;
use super::deepspeed;
use super::resolver::Resolver;
use crate::plan::{Fp8Plan, Fp8RecipePlan, ModelPlan, RanksPlan, ScaleRulePlan};
use crate::recipe::{
    AmaxComputeAlgo, Fp8FormatName, Fp8TensorName, GradientRounding, HumanFloat, HumanInt, PrecisionRecipe,
};

const RECIPE: &str = "precision.recipe";
const FORMAT: &str = "precision.format";
const MARGIN: &str = "precision.margin";
const HISTORY: &str = "precision.amax_history_len";
const ALGORITHM: &str = "precision.amax_compute_algo";
const POWER_OF_TWO: &str = "precision.power_of_two_scales";
const EPSILON: &str = "precision.amax_epsilon";
const ROUNDING: &str = "precision.gradient_rounding";
const FIRST_LAST: &str = "precision.first_last_layers_bf16";
const AT_START: &str = "precision.num_layers_at_start_in_bf16";
const AT_END: &str = "precision.num_layers_at_end_in_bf16";
const EXCLUDE: &str = "precision.exclude_modules";
const EXPERTS: &str = "precision.quantize_experts";
const EXCLUDE_SLOWER: &str = "precision.exclude_slower_modules";
const STATS: &str = "precision.stats_interval";
const STATS_MODULES: &str = "precision.stats_modules";
const STATS_TENSORS: &str = "precision.stats_tensors";
const FAKE: &str = "precision.fake_quantize";
const PARAM_GATHER: &str = "precision.fp8_param_gather";

/// Returns the settings of FP8; `None` without a recipe. Reports keys that the recipe does not read.
pub(super) fn resolve(resolver: &mut Resolver, model: &ModelPlan, ranks: &RanksPlan) -> Option<Fp8Plan> {
    let recipe = resolver.pick(RECIPE, resolver.recipe().precision.recipe, PrecisionRecipe::None);
    report_unread_keys(resolver, recipe);
    if recipe == PrecisionRecipe::None {
        return None;
    }
    let section = &resolver.recipe().precision;
    let default = if recipe == PrecisionRecipe::Blockwise { Fp8FormatName::E4m3 } else { Fp8FormatName::Hybrid };
    let plan = Fp8Plan {
        format: resolver.pick(FORMAT, section.format, default),
        gradient_rounding: resolver.pick(ROUNDING, section.gradient_rounding, GradientRounding::Nearest),
        recipe: scales(resolver, recipe),
        layers_in_bf16: layers_in_bf16(resolver),
        quantize_experts: quantize_experts(resolver, model.config.as_ref()),
        exclude_modules: resolver.pick(EXCLUDE, section.exclude_modules.clone(), Vec::new()),
        exclude_slower_modules: resolver.pick(EXCLUDE_SLOWER, section.exclude_slower_modules, false),
        stats_interval: resolver.count(STATS, section.stats_interval, 0),
        stats_modules: resolver.pick(STATS_MODULES, section.stats_modules.clone(), Vec::new()),
        stats_tensors: resolver.pick(STATS_TENSORS, section.stats_tensors.clone(), Fp8TensorName::ALL.to_vec()),
        param_gather: param_gather(resolver, recipe, model, ranks),
        fake_quantize: resolver.pick(FAKE, section.fake_quantize, false),
    };
    report_unread_selection(resolver, plan.stats_interval);
    report_unread_with_fake(resolver, &plan);
    if let Some(config) = &model.config {
        check_modules(resolver, &plan, config);
    }
    Some(plan)
}

/// Returns the source of the scales.
fn scales(resolver: &mut Resolver, recipe: PrecisionRecipe) -> Fp8RecipePlan {
    let section = &resolver.recipe().precision;
    match recipe {
        PrecisionRecipe::Delayed => Fp8RecipePlan::Delayed {
            margin: margin(resolver),
            amax_history_len: amax_history_len(resolver),
            amax_compute_algo: resolver.pick(ALGORITHM, section.amax_compute_algo, AmaxComputeAlgo::Max),
        },
        PrecisionRecipe::None | PrecisionRecipe::Current => Fp8RecipePlan::Current(scale_rule(resolver, false)),
        PrecisionRecipe::Blockwise => Fp8RecipePlan::Blockwise(scale_rule(resolver, true)),
    }
}

/// Reports keys without effect if FP8 is emulated.
fn report_unread_with_fake(resolver: &mut Resolver, plan: &Fp8Plan) {
    let gathers = resolver.recipe().precision.fp8_param_gather == Some(true);
    let keys = [(EXCLUDE_SLOWER, plan.exclude_slower_modules), (PARAM_GATHER, gathers)];
    for (key, _) in keys.into_iter().filter(|(_, is_set)| *is_set && plan.fake_quantize) {
        let message = format!("{key}: it has no effect with {FAKE}, which multiplies in model.dtype");
        resolver.report_with_advice(&[key, FAKE], message, "remove one of the keys");
    }
}

/// Fails if no linear layer is left, or a filter matches none.
fn check_modules(resolver: &mut Resolver, plan: &Fp8Plan, config: &Config) {
    let all = Fp8Plan { exclude_modules: Vec::new(), quantize_experts: true, ..plan.clone() }.modules(config);
    for text in plan.exclude_modules.iter().filter(|text| !all.iter().any(|name| name.contains(text.as_str()))) {
        let message = format!("{EXCLUDE}: no linear layer or expert has a name with {text:?}");
        let advice = format!("the names are like {}", all.first().map_or("none", String::as_str));
        resolver.report_with_advice(&[EXCLUDE], message, advice);
    }
    let ours = plan.modules(config);
    for text in plan.stats_modules.iter().filter(|text| !ours.iter().any(|name| name.contains(text.as_str()))) {
        let message = format!("{STATS_MODULES}: no module in FP8 has a name with {text:?}");
        let advice = format!("the names are like {}", ours.first().map_or("none", String::as_str));
        resolver.report_with_advice(&[STATS_MODULES], message, advice);
    }
    if ours.is_empty() {
        let message = format!("{RECIPE}: no linear layer or expert is left to multiply in FP8");
        resolver.report_with_advice(
            &[RECIPE, EXCLUDE, FIRST_LAST],
            message,
            format!("shorten {EXCLUDE} or {AT_START}"),
        );
    }
}

/// Returns true if routed experts multiply in FP8. On a GPU they do so only if the recipe sets it, because they gain no speed.
fn quantize_experts(resolver: &mut Resolver, config: Option<&Config>) -> bool {
    let given = resolver.recipe().precision.quantize_experts;
    if config.is_some_and(|config| config.moe().is_none()) {
        if given.is_some() {
            let message = format!("{EXPERTS}: it has no effect, because the model has no routed experts");
            resolver.report_with_advice(&[EXPERTS], message, "remove the key");
        }
        return false;
    }
    let is_on_gpu = is_on_gpu(resolver);
    if is_on_gpu && given.is_none() && config.is_some() {
        resolver.note(format!(
            "{EXPERTS}: routed experts stay in model.dtype, because FP8 makes them slower on a GPU; set it to true to \
             quantize them"
        ));
    }
    resolver.pick(EXPERTS, given, !is_on_gpu)
}

/// Reports a selection of statistics without statistics, or without tensors.
fn report_unread_selection(resolver: &mut Resolver, interval: usize) {
    let section = &resolver.recipe().precision;
    let keys = [(STATS_MODULES, section.stats_modules.is_some()), (STATS_TENSORS, section.stats_tensors.is_some())];
    let has_no_tensors = section.stats_tensors.as_ref().is_some_and(Vec::is_empty);
    for (key, _) in keys.into_iter().filter(|(_, is_set)| *is_set && interval == 0) {
        let message = format!("{key}: it has no effect without {STATS}");
        resolver.report_with_advice(&[key], message, format!("set {STATS}, or remove the key"));
    }
    if has_no_tensors {
        let message = format!("{STATS_TENSORS}: expected at least one of input, weight and grad_output");
        resolver.report_with_advice(&[STATS_TENSORS], message, format!("remove the key, or set {STATS}: 0"));
    }
}

/// Returns true if ZeRO stage 3 gathers FP8 weights as codes. Reports recipes that cannot.
fn param_gather(resolver: &mut Resolver, recipe: PrecisionRecipe, model: &ModelPlan, ranks: &RanksPlan) -> bool {
    let is_on = resolver.pick(PARAM_GATHER, resolver.recipe().precision.fp8_param_gather, false);
    if !is_on {
        return false;
    }
    let mut refuse = |keys: &[&str], reason: &str, advice: &str| {
        resolver.report_with_advice(keys, format!("{PARAM_GATHER}: {reason}"), advice);
    };
    if recipe == PrecisionRecipe::Blockwise {
        refuse(
            &[PARAM_GATHER, RECIPE],
            "ranks divide the 128x128 blocks of blockwise scaling",
            "set precision.recipe: current or delayed, or remove the key",
        );
    }
    if model.quantize_base.is_some() {
        refuse(
            &[PARAM_GATHER, "model.quantize_base"],
            "model.quantize_base: fp8 gathers a byte per weight already",
            "remove one of the keys",
        );
    }
    if deepspeed::stage(resolver) != Some(3) {
        let advice = format!("set deepspeed.{}: 3, or remove the key", deepspeed::STAGE);
        let message = format!("{PARAM_GATHER}: only ZeRO stage 3 gathers weights for each use");
        resolver.report_with_advice(&[PARAM_GATHER], message, advice);
    } else if ranks.zero_stage != 3 {
        resolver.note(format!("{PARAM_GATHER} has no effect: the weights of one rank are not gathered"));
    }
    ranks.zero_stage == 3
}

/// Returns the number of steps whose amaxes are kept: 4 bytes each for three tensors of each linear layer and expert's matrix.
fn amax_history_len(resolver: &mut Resolver) -> usize {
    const MOST: usize = 1 << 16;
    let len = resolver.positive(HISTORY, resolver.recipe().precision.amax_history_len, 1024);
    if len > MOST {
        resolver.report(&[HISTORY], format!("{HISTORY}: expected at most {MOST} steps, found {len}"));
    }
    len.min(MOST)
}

fn margin(resolver: &mut Resolver) -> i32 {
    const MOST: usize = 64;
    let margin = resolver.count(MARGIN, resolver.recipe().precision.margin, 0);
    if margin > MOST {
        resolver.report(&[MARGIN], format!("{MARGIN}: expected at most {MOST}, found {margin}"));
    }
    margin.min(MOST) as i32
}

fn scale_rule(resolver: &mut Resolver, power_of_two: bool) -> ScaleRulePlan {
    let section = &resolver.recipe().precision;
    ScaleRulePlan {
        power_of_two_scales: resolver.pick(POWER_OF_TWO, section.power_of_two_scales, power_of_two),
        amax_epsilon: resolver.number(EPSILON, section.amax_epsilon, 0.0, 0.0, f64::from(f32::MAX)) as f32,
    }
}

/// Returns the numbers of first and last layers that stay in the compute dtype.
fn layers_in_bf16(resolver: &mut Resolver) -> [usize; 2] {
    let section = &resolver.recipe().precision;
    let is_on = resolver.pick(FIRST_LAST, section.first_last_layers_bf16, false);
    let counts = [(AT_START, section.num_layers_at_start_in_bf16), (AT_END, section.num_layers_at_end_in_bf16)];
    if !is_on {
        for (key, _) in counts.iter().filter(|(_, count)| count.is_some()) {
            let message = format!("{key}: it has no effect without {FIRST_LAST}");
            resolver.report_with_advice(&[key], message, format!("set {FIRST_LAST}: true, or remove the key"));
        }
        return [0, 0];
    }
    counts.map(|(key, count): (&str, Option<HumanInt>)| resolver.count(key, count, 1))
}

/// Reports set keys that belong to other recipes.
fn report_unread_keys(resolver: &mut Resolver, recipe: PrecisionRecipe) {
    let section = &resolver.recipe().precision;
    let is_delayed = recipe == PrecisionRecipe::Delayed;
    let is_on = recipe != PrecisionRecipe::None;
    let has_epsilon = section.amax_epsilon.is_some_and(|HumanFloat(epsilon)| epsilon != 0.0);
    let keys = [
        (MARGIN, section.margin.is_some(), is_delayed, "delayed"),
        (HISTORY, section.amax_history_len.is_some(), is_delayed, "delayed"),
        (ALGORITHM, section.amax_compute_algo.is_some(), is_delayed, "delayed"),
        (POWER_OF_TWO, section.power_of_two_scales.is_some(), is_on && !is_delayed, "current or blockwise"),
        (EPSILON, has_epsilon, is_on && !is_delayed, "current or blockwise"),
        (FORMAT, section.format.is_some(), is_on, "delayed, current or blockwise"),
        (ROUNDING, section.gradient_rounding.is_some(), is_on, "delayed, current or blockwise"),
        (FIRST_LAST, section.first_last_layers_bf16.is_some(), is_on, "delayed, current or blockwise"),
        (AT_START, section.num_layers_at_start_in_bf16.is_some(), is_on, "delayed, current or blockwise"),
        (AT_END, section.num_layers_at_end_in_bf16.is_some(), is_on, "delayed, current or blockwise"),
        (EXCLUDE_SLOWER, section.exclude_slower_modules.is_some(), is_on, "delayed, current or blockwise"),
        (STATS, section.stats_interval.is_some(), is_on, "delayed, current or blockwise"),
        (STATS_MODULES, section.stats_modules.is_some(), is_on, "delayed, current or blockwise"),
        (STATS_TENSORS, section.stats_tensors.is_some(), is_on, "delayed, current or blockwise"),
        (PARAM_GATHER, section.fp8_param_gather.is_some(), is_on, "delayed or current"),
        (FAKE, section.fake_quantize.is_some(), is_on, "delayed, current or blockwise"),
        (EXPERTS, section.quantize_experts.is_some(), is_on, "delayed, current or blockwise"),
        (EXCLUDE, section.exclude_modules.is_some(), is_on, "delayed, current or blockwise"),
    ];
    for (key, _, _, recipes) in keys.into_iter().filter(|(_, is_set, is_read, _)| *is_set && !is_read) {
        let message = format!("{key}: it has an effect only with {RECIPE}: {recipes}");
        resolver.report_with_advice(&[key], message, "remove the key");
    }
}
