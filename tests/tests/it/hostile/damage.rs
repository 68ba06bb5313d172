//! Ways to damage any file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use rustix::fs::{CWD, Mode, mkfifoat};

/// One way to damage a file that a program reads as text or as safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// Nothing is in it.
    Empty,
    /// About the first half of it, up to the middle of a line.
    Cut,
    /// Bytes that are not UTF-8 and no format's beginning.
    Noise,
    /// Brackets within brackets, 100,000 deep.
    Deep,
    /// A folder in its place.
    Folder,
    /// A pipe that nobody writes to.
    Fifo,
    /// A link to a file without end.
    Endless,
    /// A link to itself.
    Loop,
}

/// All of them.
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

    /// Puts the damaged file in the place of the sound one.
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
