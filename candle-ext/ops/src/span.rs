//! Profiling spans: one for each op's forward and backward, and for steps of the crates above.

use tracing::span::EnteredSpan;

/// Tracing target of all profiling spans.
pub const PROFILE_TARGET: &str = "profile";

/// Opens a profiling span, which ends when the guard is dropped. It costs almost nothing without a subscriber.
///
/// `pass` distinguishes runs of the same op, such as `forward` and `backward`.
pub fn span(name: &'static str, pass: &'static str) -> EnteredSpan {
    tracing::trace_span!(target: PROFILE_TARGET, "span", name, pass).entered()
}
