//! View of a run in the terminal: `trainer watch`.
//!
//! `app` has the state and the keys, `plot` the points of the selected chart, `view` the layout, and `terminal` the loop.
//! `text` is the summary for scripts. Nothing here changes a run or its files.

mod app;
mod plot;
mod terminal;
mod text;
mod view;

pub use app::{AppControl, WatchApp};
pub use terminal::watch;
pub use text::summary_text;
pub use view::draw;
