//! Chat templates of other toolkits by name, and their built-in counterparts.

use super::converter::Converter;
use super::item::ForeignItem;

const TOKENIZERS_OWN: &str =
    "the tokenizer's own chat template applies; tokenizer.chat_template takes a built-in name or a Jinja file instead";

/// Chat template of another toolkit in the place of which a built-in one is used.
pub(super) struct ForeignTemplate {
    /// Name in the other toolkit.
    pub(super) name: &'static str,
    /// Name of the built-in template.
    pub(super) built_in: &'static str,
    /// Difference of the built-in template's text; empty if the texts are equal.
    pub(super) difference: &'static str,
}

/// Creates the row of a template with an equal text.
pub(super) const fn equal_template(name: &'static str, built_in: &'static str) -> ForeignTemplate {
    ForeignTemplate { name, built_in, difference: "" }
}

/// Converts the name of a chat template.
pub(super) fn convert_template(converter: &mut Converter<'_>, item: &ForeignItem<'_>, templates: &[ForeignTemplate]) {
    let Some(found) = templates.iter().find(|template| item.text() == Some(template.name)) else {
        return converter.change(item, [], TOKENIZERS_OWN);
    };
    let setting = [("tokenizer.chat_template", found.built_in.into())];
    match found.difference {
        "" => converter.map(item, setting),
        difference => converter.change(item, setting, difference),
    }
}
