//! An HTTP server with OpenAI's endpoints for chats and completions.
//!
//! [`http`] runs on a thread of its own. It parses requests, and sends jobs to the model's [`worker`] through a bounded
//! queue. The worker sends tokens back, and a dropped request cancels its jobs.

mod access_log;
mod api_error;
mod body;
mod chat;
mod choice;
mod completions;
mod connections;
mod deadline_stream;
mod fields;
mod generation_fields;
mod grammar_threads;
mod http;
mod job;
mod json_schema;
mod log_thread;
mod logprobs;
mod metrics;
mod origin;
mod prefix_rows;
mod reply_grammar;
mod reply_parser;
mod request_record;
mod response;
mod response_format;
mod schema_limits;
mod sequence;
mod server_state;
mod settings;
mod tool_choice;
mod worker;

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use candlewick_runtime::stop_signals::stop_signals;
use candlewick_runtime::terminal::print_note;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use tokio::sync::{mpsc, watch};

use crate::lm::Lm;
use metrics::WorkerGauges;
use server_state::{ServerEndpoints, ServerState, limits};
pub use settings::ServeSettings;
use worker::Worker;

/// Time after the second signal until the process ends in any case.
const LAST_STEP_DEADLINE: Duration = Duration::from_secs(5);

/// Serves models on `listener` until SIGINT, SIGTERM or SIGHUP. Running requests are completed until the deadline of the
/// settings; a second signal cancels them.
///
/// The models are the first one and adapters on it. They run on the calling thread.
pub fn serve(models: &[Lm], listener: TcpListener, settings: &ServeSettings) -> Result<()> {
    let first = models.first().context("failed to serve: there is no model")?;
    let (limits, max_model_len) = limits(first, settings)?;
    let address = listener.local_addr().context("failed to read the server's address")?;
    let (queue, jobs) = mpsc::channel(settings.max_queue);
    let mut signals = Signals::new(stop_signals()).context("failed to watch for signals")?;
    let handle = signals.handle();
    let (count, counted) = watch::channel(0);
    let gauges = Arc::new(WorkerGauges::default());
    let endpoints =
        ServerEndpoints { address, queue: queue.downgrade(), signals: counted, gauges: Arc::clone(&gauges) };
    let state = Arc::new(ServerState::new(models, settings, max_model_len, endpoints));
    let reporter = Arc::clone(&state.reporter);
    if !address.ip().is_loopback() && settings.api_key.is_none() {
        print_note(&format!("warning: other machines can send requests to {address} without a key; set --api-key"));
    }
    print_note(&format!("serving {} at http://{address}/v1", settings.model_names.join(", ")));
    thread::scope(|scope| {
        scope.spawn(move || {
            for signal in signals.forever() {
                count.send_modify(|n| *n += 1);
                if *count.borrow() == 2 {
                    end_later(signal);
                }
            }
        });
        let server = scope.spawn(move || {
            let served = http::run(listener, state);
            drop(queue);
            handle.close();
            served
        });
        // Ends when the server has dropped the queue.
        Worker::new(models, limits, gauges).run(jobs);
        let served = server.join().map_err(|_| anyhow!("failed to serve: the HTTP server panicked"));
        reporter.log.end();
        served?
    })
}

/// Ends the process by the signal, unless it has ended before. The model may compute a step without end.
fn end_later(signal: i32) {
    thread::spawn(move || {
        thread::sleep(LAST_STEP_DEADLINE);
        let _ = emulate_default_handler(signal);
    });
}
