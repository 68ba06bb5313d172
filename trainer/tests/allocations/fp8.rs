//! One rank in FP8, and adapters on a base in FP8: peak memory that training allocates, compared with the estimate.

use crate::estimated::Case;
use crate::one_rank::{EXPERTS, LORA_OF_EXPERTS, check, train_in_process};

const BF16: &str = "model.dtype=bf16";

const RECOMPUTED: &str = "model.activation_checkpoint=full";

const LONG: &str = "data.max_length=2048";

const SHALLOW: &str = "model.config.num_hidden_layers=2";

/// Compares runs with each recipe, and adapters on frozen weights in FP8.
pub(crate) fn check_all() {
    for recipe in ["delayed", "current", "blockwise"] {
        let recipe = format!("precision.recipe={recipe}");
        for checkpointing in [&[][..], &[RECOMPUTED]] {
            let arguments = [&[&*recipe, BF16, LONG], checkpointing].concat();
            check(&arguments);
            check(&[EXPERTS, &[SHALLOW], &arguments].concat());
        }
    }
    check(&["precision.recipe=blockwise"]);
    check(&[EXPERTS, &["precision.recipe=current", RECOMPUTED]].concat());
    for precision in ["none", "current", "blockwise"] {
        check_frozen(&format!("precision.recipe={precision}"));
    }
}

/// Compares adapters of linear layers and of experts with this precision.
fn check_frozen(precision: &str) {
    let base = [precision, "model.quantize_base=fp8", BF16, LONG];
    let [of_attention, _, of_experts] = LORA_OF_EXPERTS.map(|lora| format!("model.peft_config={{r: 16, {lora}}}"));
    let of_linears = "model.peft_config={r: 16, target_modules: all-linear}";
    // The estimate counts what threads keep with the program.
    train_in_process(&Case::new(&[EXPERTS, &base, &[&of_experts]].concat()));
    for checkpointing in [&[][..], &[RECOMPUTED]] {
        check(&[&base[..], &[of_linears], checkpointing].concat());
        check(&[EXPERTS, &base, &[&of_attention], checkpointing].concat());
        check(&[EXPERTS, &base, &[&of_experts], checkpointing].concat());
    }
}
