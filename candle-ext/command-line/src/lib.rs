//! Documents of a program's command line, made from its clap command: shell completions, man pages and a Markdown
//! reference. It also colours the labels of messages. The three programs share this crate; it uses no other crate of the
//! workspace.

mod completion;
mod label;
mod man;
mod reference;

pub use clap_complete::Shell;
pub use clap_complete::engine::{
    ArgValueCandidates, ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter,
};
pub use completion::{complete, completions};
pub use label::{stderr_has_colors, with_label_color};
pub use man::{ManArgs, ManPageError};
pub use reference::reference;
