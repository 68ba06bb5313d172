//! A model's chat template as tasks use it.

use std::sync::Once;

use candlewick_text::template::{AddGenerationPrompt, ChatTemplate, TemplateError};

use crate::task::ChatFormatter;

/// Prints chats with a template. One that knows no system turn is given the chat without it, as lm-eval does.
pub struct ChatTemplateFormatter {
    template: ChatTemplate,
    has_warned: Once,
}

impl ChatTemplateFormatter {
    /// Prints with this template.
    pub fn new(template: ChatTemplate) -> Self {
        Self { template, has_warned: Once::new() }
    }

    /// Returns the template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }
}

impl ChatFormatter for ChatTemplateFormatter {
    fn print(&self, turns: &[(&str, &str)], ending: AddGenerationPrompt) -> Result<String, TemplateError> {
        self.template.print(turns, ending).or_else(|error| {
            let without: Vec<(&str, &str)> = turns.iter().copied().filter(|(role, _)| *role != "system").collect();
            if without.len() == turns.len() {
                return Err(error);
            }
            self.has_warned.call_once(|| {
                tracing::warn!("the chat template refuses the system's turn, which is left out: {error}");
            });
            self.template.print(&without, ending)
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
        let print = |turns: &[(&str, &str)]| chat.print(turns, AddGenerationPrompt::Yes);
        assert_eq!(print(&[("system", "be kind"), ("user", "hi")]).unwrap(), "user: hi;");
        let broken = ChatTemplateFormatter::new(ChatTemplate::new("test", "{{ raise_exception('never') }}").unwrap());
        assert!(broken.print(&[("user", "hi")], AddGenerationPrompt::Yes).is_err());
    }
}
