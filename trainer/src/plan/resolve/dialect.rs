//! The defaults of recipes in ArcticTraining's dialect.

use super::deepspeed;
use super::model::ACTIVATIONS;
use super::resolver::Resolver;
use crate::data::DataKind;
use crate::recipe::RecipeDialect;

/// The keys that set the handling of long samples.
const TRUNCATION: [&str; 2] = ["data.truncation", "data.filter_samples"];

/// Adds a note with the defaults that differ from Candlewick's.
pub(super) fn note_defaults(resolver: &mut Resolver, kind: DataKind) {
    let RecipeDialect::ArcticTraining(mark) = resolver.loaded.dialect() else { return };
    let is_open = |keys: &[&str]| !keys.iter().any(|key| resolver.loaded.is_set(key));
    let defaults = [
        (deepspeed::has_arctic_default(resolver), "deepspeed.zero_optimization.stage: 2"),
        (is_open(&ACTIVATIONS), "model.activation_checkpoint: full"),
        (kind == DataKind::Sft && is_open(&TRUNCATION), "data.truncation: drop"),
    ];
    let defaults: Vec<&str> = defaults.iter().filter(|(applies, _)| *applies).map(|(_, default)| *default).collect();
    if !defaults.is_empty() {
        let defaults = defaults.join(", ");
        resolver.note(format!("the recipe is in ArcticTraining's dialect ({mark}), so its defaults apply: {defaults}"));
    }
}
