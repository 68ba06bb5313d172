//! File of tuned cuBLASLt algorithms, so that later runs use the same algorithms and give the same bits.
//!
//! A file belongs to a GPU model and a cuBLASLt version, because only that version can restore an algorithm. It also belongs to
//! a driver, with which the times may differ. Concurrent processes share the file: the first to store a GEMM decides for all.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::key::GemmKey;
use super::search::{self, Algorithm, GemmError, Library, Timed};

/// Version of the file format. Raise it when older files can no longer be read.
const FORMAT: u32 = 2;

pub(super) struct Choices {
    path: PathBuf,
    content: Content,
    has_warned: bool,
}

/// The device and the software that a file of choices belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TunedOn {
    /// Name of the GPU model.
    pub(super) device: String,
    /// Version of cuBLASLt.
    pub(super) cublas_lt: usize,
    /// Version of NVIDIA's driver.
    pub(super) driver: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Content {
    format: u32,
    #[serde(flatten)]
    tuned_on: TunedOn,
    /// Choices by the name of their key.
    choices: BTreeMap<String, Choice>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Choice {
    /// Algorithm as 128 hexadecimal digits.
    algorithm: String,
    microseconds: f32,
    /// Microseconds of the heuristic's first algorithm.
    first_microseconds: f32,
}

impl Choices {
    /// Reads the file of a device. A damaged file, or one of another device or version, is ignored with a warning.
    pub(super) fn open(folder: &Path, tuned_on: TunedOn) -> Self {
        let path = folder.join(tuned_on.file_name());
        let content = Content { format: FORMAT, tuned_on, choices: BTreeMap::new() };
        let mut choices = Self { path, content, has_warned: false };
        choices.read();
        choices
    }

    /// Returns the stored algorithm of a GEMM, or times the candidates and stores the fastest.
    ///
    /// Returns `None` if no candidate can be timed, or if the library refuses the stored one.
    pub(super) fn choose(&mut self, library: &mut impl Library, key: &GemmKey) -> Result<Option<Algorithm>, String> {
        let name = key.to_string();
        let Some(stored) = self.get(&name) else {
            return Ok(search::fastest(library, key)?.map(|timed| self.store(&name, &timed)));
        };
        match library.check(&stored) {
            Ok(()) => Ok(Some(stored)),
            Err(GemmError::Fatal(why)) => Err(why),
            Err(GemmError::Refused(why)) => {
                self.warn(format_args!("the tuned algorithm of {name} is refused ({why}): remove the file"));
                Ok(None)
            }
        }
    }

    /// Returns the stored algorithm of a GEMM.
    fn get(&self, key: &str) -> Option<Algorithm> {
        algorithm_of(&self.content.choices.get(key)?.algorithm)
    }

    /// Stores a choice unless another process has stored one. Returns the one now in effect.
    fn store(&mut self, key: &str, timed: &Timed) -> Algorithm {
        let choice = Choice {
            algorithm: hex(&timed.algorithm),
            microseconds: timed.microseconds,
            first_microseconds: timed.first_microseconds,
        };
        if let Err(error) = self.merge(key, &choice) {
            self.warn(format_args!("cannot store tuned GEMMs ({error}): another run may choose otherwise"));
        }
        self.content.choices.entry(key.to_owned()).or_insert(choice);
        self.get(key).unwrap_or(timed.algorithm)
    }

    /// Adds a choice to the file, under a lock between processes.
    fn merge(&mut self, key: &str, choice: &Choice) -> io::Result<()> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let lock = File::create(self.path.with_extension("lock"))?;
        lock.lock()?;
        self.read();
        self.content.choices.entry(key.to_owned()).or_insert_with(|| choice.clone());
        let new = self.path.with_extension(format!("{}.tmp", std::process::id()));
        fs::write(&new, serde_json::to_vec_pretty(&self.content)?)?;
        fs::rename(new, &self.path)
    }

    /// Reads the file's choices if they belong to this device.
    fn read(&mut self) {
        let read = match fs::read(&self.path) {
            Ok(bytes) => self.content.parse(&bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => Err(error.to_string()),
        };
        match read {
            Ok(choices) => self.content.choices.extend(choices),
            Err(why) => self.warn(format_args!("tuned GEMMs are ignored: {why}")),
        }
    }

    /// Logs a warning about the file, once.
    fn warn(&mut self, message: fmt::Arguments<'_>) {
        if !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!("{}: {message}", self.path.display());
        }
    }
}

impl TunedOn {
    fn file_name(&self) -> String {
        let Self { device, cublas_lt, driver } = self;
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
        let [device, driver] = [device, driver].map(|name| name.chars().map(plain).collect::<String>());
        format!("{device}-{cublas_lt}-{driver}.json")
    }
}

impl fmt::Display for TunedOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, cuBLASLt {} and driver {}", self.device, self.cublas_lt, self.driver)
    }
}

impl Content {
    /// Parses a file's choices. Fails unless they belong to this device and these versions.
    fn parse(&self, bytes: &[u8]) -> Result<BTreeMap<String, Choice>, String> {
        let found: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if (found.format, &found.tuned_on) != (self.format, &self.tuned_on) {
            let (theirs, ours) = (&found.tuned_on, &self.tuned_on);
            return Err(format!("they are of {theirs} in format {}, not of {ours} in {FORMAT}", found.format));
        }
        match found.choices.iter().find(|(_, choice)| algorithm_of(&choice.algorithm).is_none()) {
            Some((key, _)) => Err(format!("the algorithm of {key} is not 128 hexadecimal digits")),
            None => Ok(found.choices),
        }
    }
}

fn hex(algorithm: &Algorithm) -> String {
    algorithm.0.iter().map(|word| format!("{word:016x}")).collect()
}

fn algorithm_of(hex: &str) -> Option<Algorithm> {
    if hex.len() != 128 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut words = [0; 8];
    for (i, word) in words.iter_mut().enumerate() {
        *word = u64::from_str_radix(&hex[16 * i..16 * (i + 1)], 16).ok()?;
    }
    Some(Algorithm(words))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::search::tests::{Fake, key as search_key};
    use super::*;

    const DEVICE: &str = "NVIDIA H200";

    fn h200() -> TunedOn {
        TunedOn { device: DEVICE.into(), cublas_lt: 130_100, driver: "580.65.06".into() }
    }

    /// Temporary folder, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("candlewick-choices-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            Self(folder)
        }

        fn open(&self) -> Choices {
            Choices::open(&self.0, h200())
        }

        fn file(&self) -> PathBuf {
            self.0.join("NVIDIA-H200-130100-580.65.06.json")
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn timed(id: u64) -> Timed {
        let algorithm = Algorithm(std::array::from_fn(|i| id.rotate_left(8 * i as u32) ^ u64::MAX >> i));
        Timed { algorithm, microseconds: 8.0, first_microseconds: 10.0 }
    }

    #[test]
    fn a_choice_is_there_in_the_next_run_bit_for_bit() {
        let folder = Folder::new("kept");
        let mut choices = folder.open();
        assert_eq!(choices.get("k"), None);
        assert_eq!(choices.store("k", &timed(3)), timed(3).algorithm);
        choices.store("other", &timed(4));
        let again = folder.open();
        assert_eq!(again.get("k"), Some(timed(3).algorithm));
        assert_eq!(again.get("other"), Some(timed(4).algorithm));
        let left: Vec<_> = fs::read_dir(&folder.0).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "a file and its lock: {left:?}");
    }

    #[test]
    fn a_gemm_is_timed_in_the_first_run_and_never_again() {
        let folder = Folder::new("timed");
        let mut library = Fake { first_limits: Some(0), times: vec![10.0, 4.0, 7.0], ..Fake::default() };
        let chosen = folder.open().choose(&mut library, &search_key()).unwrap();
        assert_eq!(chosen, Some(Algorithm([11; 8])));
        // In another run another algorithm would be the fastest.
        let mut library = Fake { first_limits: Some(0), times: vec![10.0, 7.0, 4.0], ..Fake::default() };
        assert_eq!(folder.open().choose(&mut library, &search_key()).unwrap(), chosen);
        assert_eq!(library.calls, ["multiply 11"], "it is checked alone");
    }

    #[test]
    fn a_stored_algorithm_that_the_library_refuses_is_left_out() {
        let folder = Folder::new("refused");
        let mut library = Fake { first_limits: Some(0), times: vec![10.0, 4.0], ..Fake::default() };
        folder.open().choose(&mut library, &search_key()).unwrap();
        let mut library = Fake { first_limits: Some(0), refused: vec![11], ..Fake::default() };
        assert_eq!(folder.open().choose(&mut library, &search_key()).unwrap(), None);
        let mut library = Fake { first_limits: Some(0), fatal: Some(11), ..Fake::default() };
        assert!(folder.open().choose(&mut library, &search_key()).is_err());
    }

    #[test]
    fn a_gemm_that_no_timed_algorithm_computes_is_not_stored() {
        let folder = Folder::new("nothing");
        assert_eq!(folder.open().choose(&mut Fake::default(), &search_key()).unwrap(), None);
        assert!(!folder.file().exists());
    }

    #[test]
    fn another_device_another_library_and_another_driver_have_other_files() {
        let folder = Folder::new("others");
        folder.open().store("k", &timed(3));
        let others = [
            TunedOn { device: "NVIDIA H100".into(), ..h200() },
            TunedOn { cublas_lt: 130_200, ..h200() },
            TunedOn { driver: "580.82.07".into(), ..h200() },
        ];
        for other in others {
            assert_eq!(Choices::open(&folder.0, other.clone()).get("k"), None, "{other}");
            let mut choices = Choices::open(&folder.0, other);
            choices.store("k", &timed(4));
            assert!(!choices.has_warned, "a file of its own");
        }
        assert_eq!(folder.open().get("k"), Some(timed(3).algorithm));
    }

    #[test]
    fn of_two_processes_that_tune_at_once_the_first_to_store_decides() {
        let folder = Folder::new("two");
        let (mut first, mut second) = (folder.open(), folder.open());
        first.store("k", &timed(3));
        assert_eq!(second.store("k", &timed(4)), timed(3).algorithm);
        assert_eq!(second.store("other", &timed(5)), timed(5).algorithm);
        assert_eq!(first.store("other", &timed(6)), timed(5).algorithm);
        assert_eq!(folder.open().get("k"), Some(timed(3).algorithm));
    }

    #[test]
    fn a_file_that_is_damaged_or_belongs_elsewhere_is_ignored_and_written_anew() {
        let folder = Folder::new("damaged");
        folder.open().store("k", &timed(3));
        let good = fs::read_to_string(folder.file()).unwrap();
        let cases = [
            String::new(),
            good[..good.len() / 2].to_owned(),
            good.replace(DEVICE, "NVIDIA H100"),
            good.replace("130100", "120900"),
            good.replace("580.65.06", "570.86.15"),
            good.replace("\"format\": 2", "\"format\": 1"),
            good.replace("driver", "river"),
            good.replace(&hex(&timed(3).algorithm), "12"),
            good.replace(&hex(&timed(3).algorithm)[..2], "é"),
        ];
        for damaged in cases {
            assert_ne!(damaged, good);
            fs::write(folder.file(), &damaged).unwrap();
            let mut choices = folder.open();
            assert_eq!(choices.get("k"), None, "{damaged}");
            assert!(choices.has_warned, "{damaged}");
            choices.store("new", &timed(4));
            assert_eq!(folder.open().get("new"), Some(timed(4).algorithm), "{damaged}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_leaves_the_choice_to_this_run() {
        let folder = Folder::new("blocked");
        fs::write(&folder.0, "a file in its place").unwrap();
        let mut choices = folder.open();
        assert_eq!(choices.store("k", &timed(3)), timed(3).algorithm);
        assert_eq!(choices.get("k"), Some(timed(3).algorithm));
        fs::remove_file(&folder.0).unwrap();
    }
}
