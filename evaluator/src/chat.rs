//! Chat template of a model, as tasks apply it.

use std::sync::Once;

use candlewick_text::template::{AddGenerationPrompt, ChatTemplate, TemplateError};

use crate::task::ChatFormatter;

/// Formatter of prompts with a model's chat template. If the template rejects the system role, the system message is
/// omitted, as in lm-eval.
pub struct ChatTemplateFormatter {
    template: ChatTemplate,
    has_warned: Once,
}

impl ChatTemplateFormatter {
    /// Creates a formatter for this template.
    pub fn new(template: ChatTemplate) -> Self {
        Self { template, has_warned: Once::new() }
    }

    /// Returns the model's chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }
}

impl ChatFormatter for ChatTemplateFormatter {
    fn apply_chat_template(
        &self,
        turns: &[(&str, &str)],
        ending: AddGenerationPrompt,
    ) -> Result<String, TemplateError> {
        self.template.apply_chat_template(turns, ending).or_else(|error| {
            let without: Vec<(&str, &str)> = turns.iter().copied().filter(|(role, _)| *role != "system").collect();
            if without.len() == turns.len() {
                return Err(error);
            }
            self.has_warned.call_once(|| {
                tracing::warn!("the chat template rejects the system role; the system message is omitted: {error}");
            });
            self.template.apply_chat_template(&without, ending)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_system_turn_is_left_out_if_the_template_refuses_it() {
        let source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
                      {{ m.role }}: {{ m.content }};{% endfor %}";
        let chat = ChatTemplateFormatter::new(ChatTemplate::new("test", source).unwrap());
        let print = |turns: &[(&str, &str)]| chat.apply_chat_template(turns, AddGenerationPrompt::Yes);
        assert_eq!(print(&[("system", "be kind"), ("user", "hi")]).unwrap(), "user: hi;");
        let broken = ChatTemplateFormatter::new(ChatTemplate::new("test", "{{ raise_exception('never') }}").unwrap());
        assert!(broken.apply_chat_template(&[("user", "hi")], AddGenerationPrompt::Yes).is_err());
    }
}
