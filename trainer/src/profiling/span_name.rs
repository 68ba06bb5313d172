//! The name of a span, as its observers show it.

use tracing::field::{Field, Visit};

/// The name of a span with its pass, such as `linear forward`.
#[derive(Default)]
pub(super) struct SpanName(pub(super) String);

impl Visit for SpanName {
    fn record_str(&mut self, _: &Field, value: &str) {
        if !self.0.is_empty() && !value.is_empty() {
            self.0.push(' ');
        }
        self.0.push_str(value);
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}
