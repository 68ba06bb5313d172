//! The defaults of recipes in ArcticTraining's dialect.

use super::deepspeed;
use super::model::ACTIVATIONS;
use super::resolver::Resolver;
use crate::data::DataKind;
use crate::recipe::RecipeDialect;

/// The keys that set the handling of long samples.
const TRUNCATION: [&str; 2] = ["data.truncation", "data.filter_samples"];

/// Adds a note if ArcticTraining's defaults apply and differ from Candlewick's, or if a reader may expect them.
pub(super) fn note_defaults(resolver: &mut Resolver, kind: DataKind) {
    let reason = match resolver.loaded.dialect() {
        RecipeDialect::Candlewick => return,
        RecipeDialect::ArcticTraining(mark) => {
            format!("the recipe is in ArcticTraining's dialect ({mark}), so its defaults apply")
        }
        RecipeDialect::Mixed { mark, own_key } => {
            format!(
                "{own_key} is a key of Candlewick alone, so ArcticTraining's defaults do not apply (in spite of {mark})"
            )
        }
    };
    let is_open = |keys: &[&str]| !keys.iter().any(|key| resolver.loaded.is_set(key));
    let defaults = [
        (deepspeed::leaves_stage_open(resolver), "deepspeed.zero_optimization.stage: 2"),
        (is_open(&ACTIVATIONS), "model.activation_checkpoint: full"),
        (kind == DataKind::Sft && is_open(&TRUNCATION), "data.truncation: drop"),
    ];
    let defaults: Vec<&str> = defaults.iter().filter(|(applies, _)| *applies).map(|(_, default)| *default).collect();
    if !defaults.is_empty() {
        resolver.note(format!("{reason}: {}", defaults.join(", ")));
    }
}
