//! Template rendering with limits on time and memory.
//!
//! The engine counts instructions, but one instruction may double a list, join a million strings or drop a deeply
//! nested value. So a template is rendered on its own thread with a large stack, and the caller's thread enforces
//! the limits.

use std::cell::RefCell;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use minijinja::{Environment, Error, Value};

use super::limits::LimitedOutput;
use crate::catch_panic::catch_panic;

/// Interval between two checks of a rendering. Nearly all renderings end before the first.
const TICK: Duration = Duration::from_millis(20);
/// Number of checks before a rendering is aborted: 10 seconds in which this process runs.
const MAX_TICKS: u32 = 500;
/// Largest growth of the process during a rendering, in bytes.
const MAX_GROWTH: u64 = 512 << 20;
/// Number of checks before memory growth counts. Other threads allocate memory too, and normal renderings have ended
/// by then.
const MIN_TICKS: u32 = 25;
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
        let work = move || next.iter().map(Job::run).try_for_each(|result| send.send(result));
        thread::Builder::new().name("template".to_owned()).stack_size(n_bytes).spawn(work)?;
        Ok(Self { jobs, results })
    }

    fn render(&self, job: Job) -> Result<String, RenderFailure> {
        let gone = || RenderFailure::LimitExceeded("the template engine failed".to_owned());
        self.jobs.send(job).map_err(|_| gone())?;
        let mut before = None;
        for tick in 0..MAX_TICKS {
            match self.results.recv_timeout(TICK) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => return Err(gone()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = resident_bytes();
            let grown = now.unwrap_or(0).saturating_sub(*before.get_or_insert(now.unwrap_or(0)));
            if tick >= MIN_TICKS && grown > MAX_GROWTH {
                let most = MAX_GROWTH >> 20;
                return Err(RenderFailure::LimitExceeded(format!(
                    "one rendering takes more than {most} MiB of memory"
                )));
            }
        }
        let seconds = (TICK * MAX_TICKS).as_secs();
        Err(RenderFailure::LimitExceeded(format!("one rendering takes more than {seconds} seconds")))
    }
}

/// Returns the anonymous memory of this process in bytes, if the system reports it.
fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}
