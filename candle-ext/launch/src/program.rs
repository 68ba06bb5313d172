//! Finds the program before anything is started, so that a slip of the pen is one message and not one a worker.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Says that a program cannot be executed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// There is no such file.
    #[error("find the program {0}: there is no such file")]
    NoFile(String),
    /// It is nowhere on the path.
    #[error("find the program {0}: it is not on PATH (a program of this folder is ./{0})")]
    NotOnPath(String),
    /// The file is there and is no program.
    #[error("execute {0}: it is not an executable file")]
    NotExecutable(String),
}

/// Looks for a program as the system does. `path` is the variable PATH.
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
