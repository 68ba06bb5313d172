//! Summary of a run as plain text.

use std::time::SystemTime;

use candlewick_text::quantity::grouped;

use crate::metrics::clock;
use crate::run_history::{HistorySummary, RunHistory};

/// Returns the summary of a run: status, steps, final and best values.
pub fn summary_text(history: &RunHistory, now: SystemTime) -> String {
    let status = history.status(now);
    let reason = status.reason();
    let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let mut lines = vec![
        ("run".to_owned(), format!("{} ({})", history.name(), history.files.folder.display())),
        ("status".to_owned(), format!("{}{reason}", status.word())),
        ("steps".to_owned(), steps(history)),
    ];
    let left = history.seconds_left().filter(|seconds| status.is_in_progress() && *seconds > 0.0);
    lines.extend(left.map(|seconds| ("remaining".to_owned(), clock(seconds))));
    let numbers = HistorySummary::of(history).0.into_iter().filter(|number| number.key != "steps");
    lines.extend(numbers.map(|number| (number.label.clone(), number.text())));
    let width = lines.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
    lines.iter().map(|(label, text)| format!("{label:width$}  {text}")).collect::<Vec<_>>().join("\n")
}

/// Returns the steps done of all steps, with the percentage.
pub(super) fn steps(history: &RunHistory) -> String {
    let done = history.steps_done();
    match history.total_steps() {
        Some(total) => {
            let percent = 100 * done / total.max(1);
            format!("{} of {} ({percent}%)", grouped(done as usize), grouped(total as usize))
        }
        None => grouped(done as usize),
    }
}
