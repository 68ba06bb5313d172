//! Template rendering with limits on time and memory.
//!
//! The engine counts instructions, but one instruction may double a list, join a million strings or drop a deeply
//! nested value. So a template is rendered on its own thread with a large stack, and the caller's thread enforces
//! the limits.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use minijinja::{Environment, Error, Value};

use super::limits::LimitedOutput;
use crate::catch_panic::catch_panic;

/// Interval between two checks of a rendering. Nearly all renderings end before the first.
const TICK: Duration = Duration::from_millis(20);
/// Time after which a rendering is aborted. It is the CPU time of the rendering's thread, so a busy machine aborts no more
/// renderings than an idle one.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Largest growth of the process during a rendering, in bytes.
const MAX_GROWTH: u64 = 512 << 20;
/// Time before memory growth counts. Other threads allocate memory too, and normal renderings have ended by then.
const MIN_TIME: Duration = Duration::from_millis(500);
/// Stack sizes to try, in bytes of address space.
///
/// One level of a nested value takes at least 80 bytes, and its recursion less than 1 KiB of stack. Values within
/// [`MAX_GROWTH`] therefore fit the largest stack.
const STACKS: [usize; 4] = [8 << 30, 1 << 30, 128 << 20, 16 << 20];

/// Failure of a rendering.
#[derive(Debug)]
pub enum RenderFailure {
    /// The template or its data are invalid.
    Template(Error),
    /// The rendering exceeded a limit. Its thread may run until the process ends.
    LimitExceeded(String),
}

/// Renders a template of `environment` with the variables `context`, within the limits.
pub fn render(
    environment: &Arc<Environment<'static>>,
    name: &'static str,
    context: Value,
) -> Result<String, RenderFailure> {
    let job = Job { environment: Arc::clone(environment), name, context };
    WORKER.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = Worker::start().ok();
        }
        let Some(worker) = slot else { return job.run() };
        let result = worker.render(job);
        if matches!(result, Err(RenderFailure::LimitExceeded(_))) {
            *slot = None;
        }
        result
    })
}

thread_local! {
    static WORKER: RefCell<Option<Worker>> = const { RefCell::new(None) };
}

struct Job {
    environment: Arc<Environment<'static>>,
    name: &'static str,
    context: Value,
}

impl Job {
    fn run(self) -> Result<String, RenderFailure> {
        let mut output = LimitedOutput::default();
        let print = || {
            let template = self.environment.get_template(self.name)?;
            template.render_captured_to(self.context, &mut output).map(drop)
        };
        match catch_panic(print) {
            Ok(printed) => printed.map(|()| output.into_text()).map_err(RenderFailure::Template),
            Err(panic) => Err(RenderFailure::LimitExceeded(format!("the template engine failed: {panic}"))),
        }
    }
}

/// Thread that renders for its owner.
struct Worker {
    jobs: Sender<Job>,
    results: Receiver<Result<String, RenderFailure>>,
    /// The kernel's statistics of the thread, on Linux.
    stat: Option<PathBuf>,
}

impl Worker {
    fn start() -> io::Result<Self> {
        let mut started = Self::with_stack(STACKS[0]);
        for stack in &STACKS[1..] {
            started = started.or_else(|_| Self::with_stack(*stack));
        }
        started
    }

    fn with_stack(n_bytes: usize) -> io::Result<Self> {
        let ((jobs, next), (send, results)) = (channel::<Job>(), channel());
        let (send_stat, stat) = channel();
        let work = move || {
            let _ = send_stat.send(stat_of_this_thread());
            next.iter().map(Job::run).try_for_each(|result| send.send(result))
        };
        thread::Builder::new().name("template".to_owned()).stack_size(n_bytes).spawn(work)?;
        Ok(Self { jobs, results, stat: stat.recv().ok().flatten() })
    }

    fn render(&self, job: Job) -> Result<String, RenderFailure> {
        let gone = || RenderFailure::LimitExceeded("the template engine failed".to_owned());
        self.jobs.send(job).map_err(|_| gone())?;
        let mut before = None;
        let mut waited = Duration::ZERO;
        loop {
            match self.results.recv_timeout(TICK) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => waited += TICK,
            }
            let (memory, time) = (resident_bytes().unwrap_or(0), self.cpu_time().unwrap_or(waited));
            let (memory_before, time_before) = *before.get_or_insert((memory, time));
            check_limits(time.saturating_sub(time_before), memory.saturating_sub(memory_before))?;
        }
    }

    /// Returns the CPU time of the thread, if the system reports it.
    fn cpu_time(&self) -> Option<Duration> {
        cpu_time(self.stat.as_deref()?)
    }
}

/// Fails if a rendering has taken more time, or more bytes of memory, than it may.
fn check_limits(time: Duration, grown: u64) -> Result<(), RenderFailure> {
    let limit = if time >= MIN_TIME && grown > MAX_GROWTH {
        format!("{} MiB of memory", MAX_GROWTH >> 20)
    } else if time >= MAX_TIME {
        format!("{} seconds", MAX_TIME.as_secs())
    } else {
        return Ok(());
    };
    Err(RenderFailure::LimitExceeded(format!("one rendering takes more than {limit}")))
}

/// Returns the file with the kernel's statistics of the calling thread.
fn stat_of_this_thread() -> Option<PathBuf> {
    let thread = fs::read_link("/proc/thread-self").ok()?;
    Some(Path::new("/proc").join(thread).join("stat"))
}

/// Reads the CPU time of a thread from its statistics: `utime` and `stime` of proc(5), in hundredths of a second.
fn cpu_time(stat: &Path) -> Option<Duration> {
    let stat = fs::read_to_string(stat).ok()?;
    // The second field is the name in parentheses. `utime` is the 14th.
    let mut after_name = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || after_name.next()?.parse::<u64>().ok();
    Some(Duration::from_millis(10 * (ticks()? + ticks()?)))
}

/// Returns the anonymous memory of this process in bytes, if the system reports it.
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_rendering_is_that_of_its_thread() {
        let worker = Worker::start().unwrap();
        let (Some(before), Some(stat)) = (worker.cpu_time(), stat_of_this_thread()) else { return };
        let own = cpu_time(&stat).unwrap();
        while cpu_time(&stat).unwrap() < own + Duration::from_millis(200) {}
        assert!(worker.cpu_time().unwrap() < before + Duration::from_millis(100), "an idle thread takes no time");
    }

    #[test]
    fn time_and_memory_have_limits() {
        let check = |milliseconds, mib: u64, want: &str| {
            let found = check_limits(Duration::from_millis(milliseconds), mib << 20);
            let reason = |failure| match failure {
                RenderFailure::LimitExceeded(reason) => reason,
                RenderFailure::Template(error) => error.to_string(),
            };
            assert_eq!(found.map_or_else(reason, |()| "within".to_owned()), want);
        };
        check(9_990, 512, "within");
        check(10_000, 512, "one rendering takes more than 10 seconds");
        check(490, 9_999, "within");
        check(500, 513, "one rendering takes more than 512 MiB of memory");
    }
}
