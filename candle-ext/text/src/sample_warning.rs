//! Oddities of a rendered row that a user has to know of.

/// One oddity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SampleWarning {
    /// An assistant message without content, tool calls or reasoning.
    EmptyResponse,
    /// Tool calls, or an answer that is all reasoning, that the chat template does not render.
    ResponseNotRendered,
    /// Tool definitions that the chat template does not render.
    ToolDefinitionsNotRendered,
    /// Reasoning that the chat template never renders.
    ReasoningNotRendered,
    /// A first target token that begins in the prompt: generation never produces it.
    TokenSpansPromptBoundary,
    /// A role that chat templates do not know.
    UnknownRole,
}

/// A set of oddities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleWarnings(u32);

impl SampleWarning {
    /// Completes "these rows ...". `template` is the origin of the chat template.
    pub fn describe(self, template: &str) -> String {
        match self {
            Self::EmptyResponse => "hold an empty answer".to_owned(),
            Self::ResponseNotRendered => format!("hold tool calls that {template} does not render"),
            Self::ToolDefinitionsNotRendered => format!("offer tools that {template} does not render"),
            Self::ReasoningNotRendered => format!("hold reasoning that {template} never renders"),
            Self::TokenSpansPromptBoundary => "hold an answer whose first token begins in the prompt".to_owned(),
            Self::UnknownRole => "hold roles that chat templates do not know".to_owned(),
        }
    }

    fn bit(self) -> u32 {
        1 << self as u8
    }
}

impl SampleWarnings {
    /// Adds an oddity.
    pub fn insert(&mut self, finding: SampleWarning) {
        self.0 |= finding.bit();
    }

    /// Adds all oddities of another set.
    pub fn extend(&mut self, other: Self) {
        self.0 |= other.0;
    }

    /// Returns true if the set holds an oddity.
    pub fn contains(self, finding: SampleWarning) -> bool {
        self.0 & finding.bit() != 0
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
