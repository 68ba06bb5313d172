//! Ways to damage any file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use rustix::fs::{CWD, Mode, mkfifoat};

/// One way to damage a file that a program reads as text or as safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// An empty file.
    Empty,
    /// The first half of the file, cut within a line.
    Cut,
    /// Bytes that are neither UTF-8 nor the magic number of a format.
    Noise,
    /// Brackets within brackets, 100,000 deep.
    Deep,
    /// A folder in the file's place.
    Folder,
    /// A named pipe without a writer.
    Fifo,
    /// A link to /dev/zero, a file without end.
    Endless,
    /// A link to itself.
    Loop,
}

/// All kinds of damage.
pub(crate) const EVERY: &[Damage] = &[
    Damage::Empty,
    Damage::Cut,
    Damage::Noise,
    Damage::Deep,
    Damage::Folder,
    Damage::Fifo,
    Damage::Endless,
    Damage::Loop,
];

impl Damage {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Cut => "cut",
            Self::Noise => "noise",
            Self::Deep => "deep",
            Self::Folder => "folder",
            Self::Fifo => "fifo",
            Self::Endless => "endless",
            Self::Loop => "loop",
        }
    }

    /// Replaces the file by a damaged one.
    pub(crate) fn apply(self, path: &Path) {
        let sound = fs::read(path).unwrap();
        fs::remove_file(path).unwrap();
        match self {
            Self::Empty => fs::write(path, b"").unwrap(),
            Self::Cut => fs::write(path, &sound[..sound.len() / 2 - 7]).unwrap(),
            Self::Noise => fs::write(path, (0..4096u32).map(|i| (i * 167 + 251) as u8).collect::<Vec<_>>()).unwrap(),
            Self::Deep => fs::write(path, "[".repeat(100_000)).unwrap(),
            Self::Folder => fs::create_dir(path).unwrap(),
            Self::Fifo => mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap(),
            Self::Endless => symlink("/dev/zero", path).unwrap(),
            Self::Loop => symlink(path.file_name().unwrap(), path).unwrap(),
        }
    }
}
