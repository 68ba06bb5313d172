//! The command `man [DIR]` of a program.

use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::{Args, Command};
use clap_mangen::{Man, generate_to};

/// The arguments of a `man` command.
#[derive(Clone, Debug, Args)]
pub struct ManArgs {
    /// Folder that receives a page for the program and for each command [default: print the program's page]
    dir: Option<PathBuf>,
}

/// A failure to write man pages.
#[derive(Debug, thiserror::Error)]
#[error("write the man pages into {}: {source}", dir.display())]
pub struct ManPageError {
    dir: PathBuf,
    source: io::Error,
}

impl ManArgs {
    /// Returns the text to print: the man page of `command`, or a report of the pages that it wrote into the folder.
    ///
    /// Fails if the folder cannot be created or written.
    pub fn run(&self, command: Command) -> Result<String, ManPageError> {
        let Some(dir) = &self.dir else {
            let mut page = Vec::new();
            Man::new(command).render(&mut page).map_err(failure("stdout".as_ref()))?;
            return Ok(String::from_utf8_lossy(&page).trim_end().to_owned());
        };
        let name = command.get_name().to_owned();
        fs::create_dir_all(dir).and_then(|()| generate_to(command, dir)).map_err(failure(dir))?;
        Ok(format!("the man pages are in {dir}; read one with `man {dir}/{name}.1`", dir = dir.display()))
    }
}

fn failure(dir: &Path) -> impl Fn(io::Error) -> ManPageError {
    let dir = dir.to_owned();
    move |source| ManPageError { dir: dir.clone(), source }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn program() -> Command {
        let train = Command::new("train").about("Train a model");
        Command::new("demo").about("A demonstration").subcommand(train)
    }

    #[test]
    fn each_command_gets_a_man_page() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("man1");
        ManArgs { dir: Some(dir.clone()) }.run(program()).unwrap();
        let page = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        assert!(page("demo.1").contains("A demonstration"));
        assert!(page("demo-train.1").contains("Train a model"));
    }

    #[test]
    fn without_a_folder_the_programs_page_is_printed() {
        let page = ManArgs { dir: None }.run(program()).unwrap();
        assert!(page.contains(".TH demo 1") && page.contains("A demonstration"), "{page}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = ManArgs { dir: Some(file.path().to_owned()) }.run(program()).unwrap_err().to_string();
        assert!(error.starts_with("write the man pages into "), "{error}");
    }
}
