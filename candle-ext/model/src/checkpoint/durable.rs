//! A file that is flushed to disk while it is written, which shortens the final fsync.
//!
//! Linux starts writeback only when a tenth of memory is dirty.

use std::{
    fs::File,
    io::{self, Write},
    path::Path,
    sync::mpsc::{SyncSender, TrySendError, sync_channel},
    thread::{Builder, JoinHandle},
};

/// Bytes between two flushes.
const STRETCH: u64 = 32 << 20;

/// A new file. [`DurableFile::sync`] returns once its contents are on disk.
#[derive(Debug)]
pub struct DurableFile {
    file: File,
    n_waiting: u64,
    sync_thread: Option<SyncThread>,
}

/// A thread that calls fsync in the background.
#[derive(Debug)]
struct SyncThread {
    wake: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
}

impl DurableFile {
    /// Creates a file; an existing one is an error.
    pub fn create_new(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::create_new(path)?, n_waiting: 0, sync_thread: None })
    }

    /// Waits until all contents are on disk.
    pub fn sync(&mut self) -> io::Result<()> {
        self.sync_thread.take().map_or(Ok(()), SyncThread::finish)?;
        self.file.sync_all()
    }

    /// Requests a flush of the written bytes. Errors of the thread are returned here: the kernel reports each only
    /// once.
    fn send_off(&mut self) -> io::Result<()> {
        if self.sync_thread.is_none() {
            self.sync_thread = Some(SyncThread::start(self.file.try_clone()?)?);
        }
        let failed = self.sync_thread.take_if(|sync_thread| sync_thread.wake() == Err(TrySendError::Disconnected(())));
        failed.map_or(Ok(()), SyncThread::finish)
    }
}

impl Write for DurableFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.n_waiting += n as u64;
        if self.n_waiting >= STRETCH {
            self.n_waiting = 0;
            self.send_off()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SyncThread {
    fn start(file: File) -> io::Result<Self> {
        let (wake, woken) = sync_channel(1);
        let work = move || woken.iter().try_for_each(|()| file.sync_data());
        Ok(Self { wake, thread: Builder::new().name("sync".to_string()).spawn(work)? })
    }

    /// A full channel already holds a request.
    fn wake(&self) -> Result<(), TrySendError<()>> {
        self.wake.try_send(())
    }

    fn finish(self) -> io::Result<()> {
        drop(self.wake);
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that syncs the file panicked")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_in_any_number_of_calls_are_stored() {
        let folder = tempfile::tempdir().unwrap();
        for (i, sizes) in [vec![], vec![1], vec![STRETCH as usize, 5], vec![9 << 20; 9]].iter().enumerate() {
            let path = folder.path().join(i.to_string());
            let mut file = DurableFile::create_new(&path).unwrap();
            let pieces = sizes.iter().enumerate().map(|(n, size)| vec![n as u8 + 1; *size]);
            let want = pieces.inspect(|piece| file.write_all(piece).unwrap()).collect::<Vec<_>>().concat();
            file.sync().unwrap();
            assert!(std::fs::read(&path).unwrap() == want);
            assert!(DurableFile::create_new(&path).is_err());
        }
    }

    #[test]
    fn an_abandoned_file_can_be_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("half");
        let mut file = DurableFile::create_new(&path).unwrap();
        file.write_all(&vec![1; 2 * STRETCH as usize]).unwrap();
        drop(file);
        std::fs::remove_file(&path).unwrap();
    }

    /// A pipe does not support fsync.
    #[test]
    fn a_failed_fsync_is_an_error_that_names_the_file() {
        let (reader, writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let sync_thread = SyncThread::start(file.try_clone().unwrap()).unwrap();
        sync_thread.wake().unwrap();
        assert!(sync_thread.finish().is_err());
        let mut file = DurableFile { file, n_waiting: 0, sync_thread: None };
        assert!(file.sync().is_err());
        drop(reader);
    }
}
