//! lm-eval output types.

use candlewick_text::suggestion::did_you_mean;

use super::error::ConfigError;
use super::keys::YamlMap;

/// lm-eval output type of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputType {
    /// `loglikelihood`: log-probability of the target after the prompt.
    Loglikelihood,
    /// `loglikelihood_rolling`: log-probability of a whole text.
    LoglikelihoodRolling,
    /// `multiple_choice`: log-probability of each choice.
    MultipleChoice,
    /// `generate_until`: generated text.
    GenerateUntil,
}

impl OutputType {
    /// Returns the name in task files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loglikelihood => "loglikelihood",
            Self::LoglikelihoodRolling => "loglikelihood_rolling",
            Self::MultipleChoice => "multiple_choice",
            Self::GenerateUntil => "generate_until",
        }
    }

    const ALL: [Self; 4] = [Self::Loglikelihood, Self::LoglikelihoodRolling, Self::MultipleChoice, Self::GenerateUntil];

    /// Reads the key `output_type`.
    pub(super) fn read(keys: &YamlMap) -> Result<Self, ConfigError> {
        let Some(name) = keys.text("output_type")? else { return Ok(Self::GenerateUntil) };
        let known = || Self::ALL.iter().map(|kind| kind.name());
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let near = did_you_mean(&name, known());
            let names: Vec<_> = known().collect();
            let message = format!("output_type: unknown value {name:?}{near}; values are {}", names.join(", "));
            keys.get("output_type")
                .map_or_else(|| keys.fault(&message), |e| ConfigError::at(e.node.place.clone(), &message))
        })
    }
}
