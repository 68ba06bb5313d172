//! Options of rendering.

use crate::conversation::ChatRole;

/// Tokens of a chat that have loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LossMask {
    /// Every turn of the roles with loss.
    #[default]
    Turns,
    /// The last turn of the roles with loss.
    LastTurn,
    /// Every token (`mask_inputs: false`).
    AllTokens,
}

/// Set of roles whose turns have loss. The default is the assistant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleSet(u8);

impl RoleSet {
    /// Creates a set of roles.
    pub fn of(roles: impl IntoIterator<Item = ChatRole>) -> Self {
        Self(roles.into_iter().fold(0, |bits, role| bits | 1 << role as u8))
    }

    /// Returns true if the set has `role`.
    pub fn contains(self, role: ChatRole) -> bool {
        self.0 & 1 << role as u8 != 0
    }
}

impl Default for RoleSet {
    fn default() -> Self {
        Self::of([ChatRole::Assistant])
    }
}

/// Loss on the tokens that end turns, such as `<|im_end|>`: axolotl's `train_on_eos`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EosLoss {
    /// The ends of the turns with loss.
    #[default]
    Turn,
    /// The ends of all turns.
    All,
    /// The end of the last turn with loss.
    Last,
    /// No end of turn.
    None,
}

/// Form in which a prompt and its completion, both strings, are rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PromptForm {
    /// A chat of two messages, if there is a chat template.
    #[default]
    Chat,
    /// Plain text, without the chat template. Conversations are refused.
    Text,
}

/// Loss on the empty `<think></think>` that some templates put before an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EmptyThinkLoss {
    /// The empty block has loss.
    #[default]
    Include,
    /// The empty block is masked (`ignore_empty_think: true`).
    Mask,
}

/// Loss on assistant messages without content, tool calls and reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EmptyAnswerLoss {
    /// The end-of-turn token is masked.
    #[default]
    Mask,
    /// The end-of-turn token has loss (`train_on_empty_answers: true`).
    Include,
}

/// Special tokens around text that is rendered without a chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextSpecialTokens {
    /// Adds BOS before the text. `None` follows the tokenizer's configuration.
    pub add_bos_token: Option<bool>,
    /// Adds EOS after the text, as a document separator.
    pub add_eos_token: bool,
    /// Tokens after which a text is cut, without special tokens. `None` cuts nothing.
    pub max_text_tokens: Option<usize>,
}

impl Default for TextSpecialTokens {
    fn default() -> Self {
        Self { add_bos_token: None, add_eos_token: true, max_text_tokens: None }
    }
}

/// Options of rendering a document to a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RenderOptions {
    /// Tokens that have loss.
    pub targets: LossMask,
    /// Roles whose turns have loss.
    pub roles: RoleSet,
    /// Loss on the ends of turns.
    pub eos: EosLoss,
    /// Form of prompts with completions.
    pub prompt_form: PromptForm,
    /// Loss on an empty `<think></think>`.
    pub empty_think: EmptyThinkLoss,
    /// Loss on empty assistant messages.
    pub empty_answers: EmptyAnswerLoss,
    /// Special tokens around text without a chat template.
    pub specials: TextSpecialTokens,
}
