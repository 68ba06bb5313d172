//! Documents of a program's command line, made from its clap command: shell completions, man pages and a Markdown
//! reference. It also colours the labels of messages. The three programs share this crate; it uses no other crate of the
//! workspace.

mod label;
mod man;
mod reference;

use clap::Command;

pub use clap_complete::Shell;
pub use label::{stderr_has_colors, with_label_color};
pub use man::{ManArgs, ManPageError};
pub use reference::reference;

/// Returns the shell completion script of a program.
pub fn completions(mut command: Command, shell: Shell) -> String {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
