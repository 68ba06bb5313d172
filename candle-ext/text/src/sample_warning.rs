//! Warnings about a tokenized sample that change what it trains.

/// One warning about a tokenized sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SampleWarning {
    /// An assistant message without content, tool calls or reasoning.
    EmptyResponse,
    /// Tool calls, or a response of reasoning alone, that the chat template omits.
    ResponseNotRendered,
    /// Tool definitions that the chat template omits.
    ToolDefinitionsNotRendered,
    /// Reasoning that the chat template always omits.
    ReasoningNotRendered,
    /// A token that spans the boundary of prompt and response. Generation never produces this token.
    TokenSpansPromptBoundary,
    /// A role that chat templates do not define.
    UnknownRole,
    /// A message whose content the chat template omits.
    MessageNotRendered,
}

/// Warnings about messages and responses that the text lacks.
const UNRENDERED: [SampleWarning; 2] = [SampleWarning::ResponseNotRendered, SampleWarning::MessageNotRendered];

/// Set of [`SampleWarning`]s, stored as a bit mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleWarnings(u32);

impl SampleWarning {
    /// Returns the words that complete "these rows ...". `template` is the file or argument that holds the chat
    /// template.
    pub fn describe(self, template: &str) -> String {
        match self {
            Self::EmptyResponse => "hold an empty answer".to_owned(),
            Self::ResponseNotRendered => {
                format!("hold tool calls, or answers of reasoning alone, that {template} does not render")
            }
            Self::ToolDefinitionsNotRendered => format!("offer tools that {template} does not render"),
            Self::ReasoningNotRendered => format!("hold reasoning that {template} never renders"),
            Self::TokenSpansPromptBoundary => "hold an answer whose first token begins in the prompt".to_owned(),
            Self::UnknownRole => "hold roles that chat templates do not know".to_owned(),
            Self::MessageNotRendered => format!("hold messages whose content {template} does not render"),
        }
    }

    fn bit(self) -> u32 {
        1 << self as u8
    }
}

impl SampleWarnings {
    /// Adds a warning.
    pub fn insert(&mut self, warning: SampleWarning) {
        self.0 |= warning.bit();
    }

    /// Adds all warnings of another set.
    pub fn extend(&mut self, other: Self) {
        self.0 |= other.0;
    }

    /// Returns true if the set contains `warning`.
    pub fn contains(self, warning: SampleWarning) -> bool {
        self.0 & warning.bit() != 0
    }

    /// Returns true if a message or a response is not rendered. Then the answers have another context than in the data, or
    /// are missing.
    pub fn has_unrendered(self) -> bool {
        UNRENDERED.into_iter().any(|warning| self.contains(warning))
    }

    /// Returns the words that complete "these rows ...", about messages and responses that are not rendered.
    pub fn describe_unrendered(self, template: &str) -> String {
        let found = UNRENDERED.into_iter().filter(|warning| self.contains(*warning));
        found.map(|warning| warning.describe(template)).collect::<Vec<_>>().join(", or ")
    }

    /// Returns the set as a number, for storage.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Reads a set that [`SampleWarnings::bits`] wrote.
    pub fn from_bits(bits: u32) -> Self {
        Self(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_set_is_read_back() {
        let mut sample_warnings = SampleWarnings::default();
        sample_warnings.insert(SampleWarning::TokenSpansPromptBoundary);
        sample_warnings.insert(SampleWarning::EmptyResponse);
        let read = SampleWarnings::from_bits(sample_warnings.bits());
        assert!(read.contains(SampleWarning::EmptyResponse) && read.contains(SampleWarning::TokenSpansPromptBoundary));
        assert!(!read.contains(SampleWarning::UnknownRole) && !read.contains(SampleWarning::ResponseNotRendered));
    }
}
