//! Tokenization of conversations, prompts and texts, with a loss mask.

mod chat;
mod end_of_turn;
mod error;
mod options;
mod sample;

use crate::conversation::Conversation;
use crate::format::{Document, RowFormat};
use crate::sample_warning::{SampleWarning, SampleWarnings};
use crate::template::{AddGenerationPrompt, ChatTemplate};
use crate::tokenizer::{SpecialTokens, Tokenizer};
use chat::{begins_in_prompt, overlapping, refuse_dropped_text};

use error::no_tokens;

pub use chat::render_chat;
pub use end_of_turn::{GENERATION_CONFIG, end_of_turn, generation_config_with_end_of_turn};
pub use error::RenderError;
pub use options::{
    EmptyAnswerLoss, EmptyThinkLoss, EosLoss, LossMask, PromptForm, RenderOptions, RoleSet, TextSpecialTokens,
};
pub use sample::Sample;

/// Renders a document that `format` read, and warns about roles that neither the mapping nor chat templates define.
pub fn render_row(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    format: &RowFormat,
    document: Document,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let has_unknown_role = format.has_unknown_role(&document);
    let mut sample = render_document(tokenizer, template, document, options)?;
    if has_unknown_role {
        sample.sample_warnings.insert(SampleWarning::UnknownRole);
    }
    Ok(sample)
}

/// Renders a document to a sample, for training and evaluation.
///
/// The template renders chats. A prompt and its completion become a chat if there is a template, unless
/// `options.prompt_form` is text. Plain text is tokenized without a template.
pub fn render_document(
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    document: Document,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let is_chat = template.is_some() && options.prompt_form == PromptForm::Chat;
    let document = if is_chat { document.into_chat() } else { document };
    let mut sample = match (&document, template) {
        (Document::Text(text), _) => text_sample(tokenizer, text, options.specials, options.eos)?,
        (Document::Tokens { ids, is_target }, _) => tokenized(tokenizer, ids, is_target.as_deref(), options.targets)?,
        (Document::PromptCompletion { prompt, completion }, _) => {
            render_completion(tokenizer, prompt, completion, options)?
        }
        (Document::Conversation(_), _) if options.prompt_form == PromptForm::Text => {
            return Err(RenderError::TemplateOff);
        }
        (Document::Conversation(chat), Some(template)) => {
            return render_chat(tokenizer, template, &template.adapt(chat), options);
        }
        (Document::Conversation(_), None) => return Err(RenderError::NoTemplate(tokenizer.directory().to_owned())),
    };
    if options.targets == LossMask::AllTokens && options.eos != EosLoss::None {
        sample.is_target.fill(true);
    }
    Ok(sample)
}

/// Returns the sample of a tokenized row. Chats need its loss mask.
fn tokenized(
    tokenizer: &Tokenizer,
    ids: &[u32],
    is_target: Option<&[bool]>,
    targets: LossMask,
) -> Result<Sample, RenderError> {
    if let Some(id) = ids.iter().max().filter(|id| tokenizer.id_to_token(**id).is_none()) {
        return Err(RenderError::UnknownTokenId { id: *id, folder: tokenizer.directory().to_owned() });
    }
    let is_target = match (is_target, targets) {
        (Some(is_target), _) => is_target.to_vec(),
        (None, LossMask::AllTokens) => vec![true; ids.len()],
        (None, LossMask::Turns | LossMask::LastTurn) => return Err(RenderError::NoLabels),
    };
    Ok(Sample { ids: ids.to_vec(), is_target, ..Sample::default() })
}

/// Renders a chat with the generation prompt and returns its token ids.
pub fn render_prompt(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    chat: &Conversation,
) -> Result<Vec<u32>, RenderError> {
    let text = template.render(chat, AddGenerationPrompt::Yes)?;
    Ok(tokenizer.encode(&text, SpecialTokens::Exclude)?)
}

/// Renders plain text, followed by EOS. Every token has loss. Blank text gives no tokens.
pub fn render_text(tokenizer: &Tokenizer, text: &str, specials: TextSpecialTokens) -> Result<Sample, RenderError> {
    text_sample(tokenizer, text, specials, EosLoss::Turn)
}

fn text_sample(
    tokenizer: &Tokenizer,
    text: &str,
    specials: TextSpecialTokens,
    eos: EosLoss,
) -> Result<Sample, RenderError> {
    if text.trim().is_empty() {
        return Ok(Sample::default());
    }
    let mut ids = tokenizer.encode(text, SpecialTokens::Exclude)?;
    if ids.is_empty() {
        return Err(no_tokens(text));
    }
    ids.truncate(specials.max_text_tokens.unwrap_or(usize::MAX));
    surround(tokenizer, Sample::all_targets(ids), specials, eos)
}

/// Renders a prompt and its completion without a chat template: BOS, both texts as one, EOS.
///
/// The completion and EOS have loss, as `options` say. After an empty completion, `empty_answers` decides.
pub fn render_completion(
    tokenizer: &Tokenizer,
    prompt: &str,
    completion: &str,
    options: RenderOptions,
) -> Result<Sample, RenderError> {
    let text = [prompt, completion].concat();
    let encoded = tokenizer.encode_with_offsets(&text)?;
    refuse_dropped_text(tokenizer, &text, &encoded)?;
    let mut sample_warnings = SampleWarnings::default();
    if begins_in_prompt(&encoded, &(prompt.len()..text.len())) {
        sample_warnings.insert(SampleWarning::TokenSpansPromptBoundary);
    }
    let first = if options.targets == LossMask::AllTokens { 0 } else { prompt.len() };
    let is_target = overlapping(&encoded, std::slice::from_ref(&(first..text.len())));
    let sample = Sample { ids: encoded.ids, is_target, sample_warnings };
    let mut sample = surround(tokenizer, sample, options.specials, options.eos)?;
    if completion.trim().is_empty() {
        sample.sample_warnings.insert(SampleWarning::EmptyResponse);
        if options.empty_answers == EmptyAnswerLoss::Mask {
            sample.is_target.fill(false);
        }
    }
    Ok(sample)
}

/// Adds BOS without loss and EOS, which has loss unless `eos` excludes it.
fn surround(
    tokenizer: &Tokenizer,
    sample: Sample,
    specials: TextSpecialTokens,
    eos: EosLoss,
) -> Result<Sample, RenderError> {
    let own = tokenizer.post_processor_tokens();
    let before = match specials.add_bos_token {
        None => own.before.clone(),
        Some(false) => Vec::new(),
        Some(true) => vec![tokenizer.bos().ok_or(RenderError::NoBosToken)?.id],
    };
    let after = match (specials.add_eos_token, tokenizer.eos()) {
        (true, Some(eos)) if own.after.is_empty() => vec![eos.id],
        (true, _) => own.after.clone(),
        (false, _) => Vec::new(),
    };
    let (n_before, n_after) = (before.len(), after.len());
    Ok(Sample {
        ids: [before, sample.ids, after].concat(),
        is_target: [vec![false; n_before], sample.is_target, vec![eos != EosLoss::None; n_after]].concat(),
        sample_warnings: sample.sample_warnings,
    })
}
