//! Token that ends a turn, as a stop token of generation.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::{RenderOptions, render_chat};
use crate::conversation::{Conversation, Message};
use crate::template::ChatTemplate;
use crate::tokenizer::{Tokenizer, TokenizerError, read_json_object};

/// File of a model folder with the stop tokens of generation.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// Returns the template's end-of-turn token, if it has one. It may differ from the tokenizer's EOS.
pub fn end_of_turn(tokenizer: &Tokenizer, template: &ChatTemplate) -> Option<u32> {
    let turns = [Message::new("system", "s"), Message::new("user", "a"), Message::new("assistant", "b")];
    // Some templates reject a system message, others require it.
    let render = |turns: &[Message]| {
        let chat = Conversation::new(turns.iter().cloned());
        render_chat(tokenizer, template, &chat, RenderOptions::default()).ok()
    };
    let sample = render(&turns[1..]).or_else(|| render(&turns))?;
    let last = sample.is_target.iter().rposition(|is_target| *is_target)?;
    Some(sample.ids[last]).filter(|id| tokenizer.is_special(*id))
}

/// Returns a generation_config.json whose `eos_token_id` has the template's end of turn, for programs that know nothing
/// of the template. `None` if the tokenizer's EOS ids have it. The other keys are those of the file in `folder`.
///
/// # Errors
/// If the file in `folder` is invalid.
pub fn generation_config_with_end_of_turn(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    folder: Option<&Path>,
) -> Result<Option<String>, TokenizerError> {
    let end = end_of_turn(tokenizer, template).filter(|end| !tokenizer.eos_ids().contains(end));
    let Some(end) = end else { return Ok(None) };
    let mut config = match folder {
        Some(folder) => read_json_object(&folder.join(GENERATION_CONFIG))?,
        None => serde_json::Map::new(),
    };
    let ids: Vec<u32> = tokenizer.eos_ids().iter().copied().chain([end]).collect();
    config.insert("eos_token_id".to_owned(), json!(ids));
    Ok(Some(format!("{:#}\n", Json::Object(config))))
}
