//! The command `serve`: an OpenAI-compatible HTTP server.

use std::fs::{File, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::open_regular_file;
use candlewick_text::hub::Hub;
use clap::Args;

use super::model::{ComputeOptions, QuantizationOption, TemplateOptions, not_found};
use crate::lm::Lm;
use crate::reasoning::ReasoningFormat;
use crate::serve::{self, ServeSettings};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::terminal::print_note;

/// Options of `serve`.
#[derive(Debug, Args)]
pub struct ServeOptions {
    #[command(flatten)]
    compute: ComputeOptions,
    /// IP address to listen on; 0.0.0.0 and :: are all interfaces
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// TCP port; 0 is any free port
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Key that requests must send as `Authorization: Bearer KEY`
    #[arg(long, value_name = "KEY", env = "CANDLEWICK_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// LoRA adapters on the model, which requests choose by name: a folder, a Hub id, or the output folder of a run
    #[arg(long, value_name = "NAME=PATH", num_args = 1.., value_parser = lora_module)]
    lora_modules: Vec<LoraModule>,
    /// Name of the model in requests and responses [default: MODEL]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Maximum number of tokens of prompt and completion [default: the model's context, or the KV cache if that is
    /// smaller]
    #[arg(long, value_name = "N")]
    max_model_len: Option<NonZeroUsize>,
    /// Maximum number of sequences that are generated at the same time [default: 64 on a CPU, 256 on a GPU]
    #[arg(long, value_name = "N", value_parser = n_sequences)]
    max_num_seqs: Option<usize>,
    /// Number of tokens in the KV cache [default: 2 GiB of them on a CPU, 8 GiB on a GPU]
    #[arg(long, value_name = "N")]
    max_total_tokens: Option<NonZeroUsize>,
    /// Maximum number of waiting sequences; a request that exceeds it gets status 429
    #[arg(long, value_name = "N", default_value = "256", value_parser = n_sequences)]
    max_queue: usize,
    /// Time in seconds of running requests after SIGINT or SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    shutdown_timeout: u32,
    /// Host names that a server on a loopback address answers, besides localhost: those of a reverse proxy
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = host_name)]
    allowed_hosts: Vec<String>,
    /// Origins of web pages that may send requests, such as https://chat.example.org; * is any
    #[arg(long, value_name = "ORIGIN", num_args = 1.., value_parser = web_origin)]
    allowed_origins: Vec<String>,
    /// File to which a line of JSON is appended for each request, without prompts and answers
    #[arg(long, value_name = "FILE")]
    request_log: Option<PathBuf>,
    /// Format of the model's thinking in chats
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = ReasoningFormat::Auto)]
    reasoning_format: ReasoningFormat,
    #[command(flatten)]
    template: TemplateOptions,
}

/// A LoRA adapter and its name in requests.
#[derive(Clone, Debug)]
struct LoraModule {
    name: String,
    path: String,
}

fn lora_module(text: &str) -> Result<LoraModule, String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok(LoraModule { name: name.to_owned(), path: path.to_owned() })
        }
        _ => Err("expected NAME=PATH, such as sql=runs/sql-lora".to_owned()),
    }
}

/// Largest number of sequences that run or wait.
const MAX_SEQUENCES: usize = 1 << 16;

fn n_sequences(text: &str) -> Result<usize, String> {
    let n = text.parse().ok().filter(|n| (1..=MAX_SEQUENCES).contains(n));
    n.ok_or_else(|| format!("expected an integer from 1 to {MAX_SEQUENCES}"))
}

fn host_name(text: &str) -> Result<String, String> {
    match text.is_empty() || text.contains([':', '/', '*']) {
        true => Err("expected a name without port, scheme and wildcard, such as gpu-box".to_owned()),
        false => Ok(text.to_owned()),
    }
}

fn web_origin(text: &str) -> Result<String, String> {
    let host = text.split_once("://").map(|(_, host)| host.trim_end_matches('/'));
    match text == "*" || host.is_some_and(|host| !host.is_empty() && !host.contains('/')) {
        true => Ok(text.trim_end_matches('/').to_owned()),
        false => Err("expected a scheme and a host, such as https://chat.example.org, or *".to_owned()),
    }
}

impl ServeOptions {
    /// Returns the names of the model and of the adapters. Fails if two are equal.
    fn model_names(&self, model: String) -> Result<Vec<String>> {
        let mut names = vec![model];
        for LoraModule { name, .. } in &self.lora_modules {
            if names.contains(name) {
                let problem =
                    format!("--lora-modules: the name {name} is used twice; requests choose a model by its name");
                return Err(anyhow!("failed to start: {problem}").context(ExitCode::Usage));
            }
            names.push(name.clone());
        }
        Ok(names)
    }

    /// Loads the model, and the adapters on its weights.
    fn load(&self, model: &str, hub: &Hub) -> Result<Vec<Lm>> {
        if !self.lora_modules.is_empty() && self.compute.quantization != QuantizationOption::None {
            let problem = "--lora-modules needs weights without --quantization";
            return Err(anyhow!("failed to start: {problem}").context(ExitCode::Usage));
        }
        let mut models = vec![self.compute.load(model, hub)?];
        for LoraModule { path, .. } in &self.lora_modules {
            let (folder, note) = hub.adapter(path).map_err(not_found)?;
            note.iter().for_each(|note| print_note(note));
            let adapted = models[0].with_adapter(Some(&folder));
            models.push(adapted.with_context(|| format!("failed to load the adapter {path}"))?);
        }
        models.into_iter().map(|lm| self.template.apply(lm)).collect()
    }
}

/// Opens the request log. Writes to a pipe could wait for its reader.
fn open_log(path: &Path) -> Result<Arc<File>> {
    let existing = if path.exists() { open_regular_file(path).map(drop) } else { Ok(()) };
    let opened = existing.and_then(|()| OpenOptions::new().append(true).create(true).open(path));
    let opened = opened.with_context(|| format!("failed to open --request-log {}", path.display()));
    opened.map(Arc::new).context(ExitCode::Usage)
}

/// Serves `model`, a path or Hub id, until SIGINT, SIGTERM or SIGHUP.
pub fn serve(model: &str, options: &ServeOptions, hub: &Hub) -> Result<()> {
    let address = SocketAddr::new(options.host, options.port);
    // A used port is an error before the model is loaded.
    let listener = TcpListener::bind(address).with_context(|| format!("failed to listen on {address}"));
    let listener = listener.context(ExitCode::Usage)?;
    let request_log = options.request_log.as_deref().map(open_log).transpose()?;
    let name = options.served_model_name.clone().unwrap_or_else(|| model.to_owned());
    let model_names = options.model_names(name)?;
    let models = options.load(model, hub)?;
    let settings = ServeSettings {
        model_names,
        api_key: options.api_key.clone().filter(|key| !key.is_empty()),
        max_model_len: options.max_model_len.map(NonZeroUsize::get),
        max_num_seqs: options.max_num_seqs,
        max_total_tokens: options.max_total_tokens.map(NonZeroUsize::get),
        max_queue: options.max_queue,
        shutdown_timeout: Duration::from_secs(options.shutdown_timeout.into()),
        allowed_hosts: options.allowed_hosts.clone(),
        allowed_origins: options.allowed_origins.clone(),
        request_log,
        reasoning_format: options.reasoning_format,
    };
    serve::serve(&models, listener, &settings)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_request_log_is_a_regular_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        assert!(open_log(&path).is_ok() && open_log(&path).is_ok());
        for path in [folder.path(), Path::new("/dev/null")] {
            let error = format!("{:#}", open_log(path).unwrap_err());
            assert!(error.contains("not a regular file"), "{error}");
        }
    }
}
