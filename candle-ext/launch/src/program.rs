//! Finds the program before workers start, so that a wrong name is one error message and not one per worker.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// An error of a program that cannot be executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// The file does not exist.
    #[error("find the program {0}: there is no such file")]
    NoFile(String),
    /// No directory of `PATH` contains the program.
    #[error("find the program {0}: it is not on PATH (write ./{0} for a program in the current directory)")]
    NotOnPath(String),
    /// The file exists and is not executable.
    #[error("execute {0}: it is not an executable file")]
    NotExecutable(String),
}

/// Searches a program as `execvp` does. `path` is the value of `PATH`.
pub fn find(program: &str, path: &str) -> Result<PathBuf, ProgramError> {
    if !program.contains('/') {
        let mut folders = path.split(':').map(Path::new);
        let found = folders.find_map(|folder| Some(folder.join(program)).filter(|file| is_executable(file)));
        return found.ok_or_else(|| ProgramError::NotOnPath(program.to_owned()));
    }
    match Path::new(program) {
        file if is_executable(file) => Ok(file.to_owned()),
        file if file.exists() => Err(ProgramError::NotExecutable(program.to_owned())),
        _ => Err(ProgramError::NoFile(program.to_owned())),
    }
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_searched_on_path() {
        assert_eq!(find("sh", "/nowhere:/bin"), Ok("/bin/sh".into()));
        assert_eq!(find("/bin/sh", ""), Ok("/bin/sh".into()));
    }

    #[test]
    fn a_file_that_cannot_be_executed_is_rejected() {
        assert_eq!(find("sh", "/nowhere"), Err(ProgramError::NotOnPath("sh".into())));
        assert_eq!(find("/bin/no-such", ""), Err(ProgramError::NoFile("/bin/no-such".into())));
        assert_eq!(find("/etc/passwd", ""), Err(ProgramError::NotExecutable("/etc/passwd".into())));
    }
}
