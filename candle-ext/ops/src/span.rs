//! What a profile sees: a span for each op's forward and backward, and for what the rooms above do.

use tracing::span::EnteredSpan;

/// The target of every span that a profile is made of.
pub const PROFILE_TARGET: &str = "profile";

/// Opens a span that ends when the guard is dropped. It costs nothing unless somebody listens.
///
/// `pass` tells runs of one thing apart: forward and backward, say.
pub fn span(name: &'static str, pass: &'static str) -> EnteredSpan {
    tracing::trace_span!(target: PROFILE_TARGET, "span", name, pass).entered()
}
