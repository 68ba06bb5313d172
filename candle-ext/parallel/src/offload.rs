//! Activation offloading: to CPU memory, or to files.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::{DType, Error, Result, Tensor};
use candlewick_ops::{HostBuffer, tensor_from_bytes, with_bytes};

/// Destination of offloaded activations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OffloadTarget {
    /// CPU memory, for activations of a GPU.
    HostMemory,
    /// Unlinked temporary files in this folder, for activations computed on the CPU.
    Folder(PathBuf),
}

/// Most bytes of an activation that is copied back early, and needs memory meanwhile. Layers with larger inputs compute for much
/// longer than the copy takes.
pub(crate) const MAX_PREFETCHED_BYTES: u64 = 512 << 20;

/// An offloaded activation. [`OffloadedActivation::fetch`] restores it bit for bit.
pub(crate) enum OffloadedActivation {
    Host(HostBuffer),
    InFile { file: File, shape: Vec<usize>, dtype: DType },
}

impl OffloadedActivation {
    pub(crate) fn offload(x: &Tensor, target: &OffloadTarget) -> Result<Self> {
        let folder = match target {
            OffloadTarget::HostMemory => return Ok(Self::Host(HostBuffer::start(x)?)),
            OffloadTarget::Folder(folder) => folder,
        };
        let file = tempfile::tempfile_in(folder).map_err(|error| failed("open a file", folder, &error))?;
        with_bytes(x, |bytes| write(&file, bytes, folder))?;
        Ok(Self::InFile { file, shape: x.dims().to_vec(), dtype: x.dtype() })
    }

    /// Starts to copy the activation back to the device, if it is in host memory and has at most [`MAX_PREFETCHED_BYTES`].
    /// [`Self::fetch`] reads all others.
    pub(crate) fn prefetch(&mut self) -> Result<()> {
        match self {
            Self::Host(copy) if copy.n_bytes() <= MAX_PREFETCHED_BYTES => copy.prefetch(),
            Self::Host(_) | Self::InFile { .. } => Ok(()),
        }
    }

    /// Releases the device memory of the activation. Compute waits until it is copied.
    pub(crate) fn release_source(&self) -> Result<()> {
        match self {
            Self::Host(copy) => copy.release_sources(),
            Self::InFile { .. } => Ok(()),
        }
    }

    pub(crate) fn fetch(self) -> Result<Tensor> {
        match self {
            Self::Host(copy) => copy.into_device(),
            Self::InFile { file, shape, dtype } => {
                tensor_from_bytes(dtype, shape, |bytes| Ok(file.read_exact_at(bytes, 0)?))
            }
        }
    }
}

fn write(file: &File, bytes: &[u8], folder: &Path) -> Result<()> {
    let doing = || format!("offload an activation of {:.1} MiB", bytes.len() as f64 / f64::from(1 << 20));
    file.write_all_at(bytes, 0).map_err(|error| failed(&doing(), folder, &error))
}

fn failed(doing: &str, folder: &Path, error: &io::Error) -> Error {
    let advice = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; set TMPDIR to a folder with more space, or offload the activations of fewer layers"
        }
        _ => "; set TMPDIR to a folder that this user may write to",
    };
    // The kind decides on the exit code.
    Error::from(io::Error::new(error.kind(), format!("failed to {doing} in {}: {error}{advice}", folder.display())))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[track_caller]
    fn check(x: Tensor) {
        for target in [OffloadTarget::HostMemory, OffloadTarget::Folder(std::env::temp_dir())] {
            let back = OffloadedActivation::offload(&x, &target).unwrap().fetch().unwrap();
            assert_eq!((back.dims(), back.dtype()), (x.dims(), x.dtype()));
            let flat = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(flat(&back), flat(&x));
        }
    }

    #[test]
    fn an_offloaded_activation_comes_back_unchanged() {
        let x = Tensor::arange(0f32, 24.0, &Device::Cpu).unwrap().reshape((4, 6)).unwrap();
        check(x.clone());
        check(x.to_dtype(DType::BF16).unwrap());
        check(x.to_dtype(DType::F16).unwrap());
        check(x.narrow(0, 1, 2).unwrap().t().unwrap());
        check(Tensor::zeros((0, 6), DType::F32, &Device::Cpu).unwrap());
    }

    #[test]
    fn a_missing_folder_is_an_error_with_a_remedy() {
        let x = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let offloaded = OffloadedActivation::offload(&x, &OffloadTarget::Folder("/nowhere/at/all".into()));
        let message = offloaded.err().unwrap().to_string();
        assert!(
            message.contains("failed to open a file in /nowhere/at/all") && message.contains("TMPDIR"),
            "{message}"
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_with_a_remedy() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = write(&full, &[0; 1 << 19], Path::new("/big")).unwrap_err();
        assert_eq!(candlewick_model::io_cause(&error).map(io::Error::kind), Some(ErrorKind::StorageFull));
        let message = error.to_string();
        assert!(message.starts_with("failed to offload an activation of 0.5 MiB in /big: "), "{message}");
        assert!(message.contains("set TMPDIR to a folder with more space"), "{message}");
    }
}
