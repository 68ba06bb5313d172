//! The command `serve`: an OpenAI-compatible HTTP server.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::num::NonZeroUsize;

use anyhow::{Context, Result};
use candlewick_text::hub::Hub;
use clap::Args;

use super::model::{ComputeOptions, TemplateOptions};
use crate::serve::{self, ServeSettings};
use candlewick_runtime::exit::ExitCode;

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
    /// Name of the model in requests and responses [default: MODEL]
    #[arg(long, value_name = "NAME")]
    served_model_name: Option<String>,
    /// Maximum number of tokens of prompt and completion [default: the model's context, or the KV cache if that is
    /// smaller]
    #[arg(long, value_name = "N")]
    max_model_len: Option<NonZeroUsize>,
    /// Maximum number of sequences that are generated at the same time [default: 64 on a CPU, 256 on a GPU]
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<NonZeroUsize>,
    /// Maximum number of waiting sequences; a request that exceeds it gets status 429
    #[arg(long, value_name = "N", default_value = "256")]
    max_queue: NonZeroUsize,
    #[command(flatten)]
    template: TemplateOptions,
}

/// Serves `model`, a path or Hub id, until SIGINT or SIGTERM.
pub fn serve(model: &str, options: &ServeOptions, hub: &Hub) -> Result<()> {
    let address = SocketAddr::new(options.host, options.port);
    // A used port is an error before the model is loaded.
    let listener = TcpListener::bind(address).with_context(|| format!("failed to listen on {address}"));
    let listener = listener.context(ExitCode::Usage)?;
    let lm = options.template.apply(options.compute.load(model, hub)?)?;
    let settings = ServeSettings {
        model_name: options.served_model_name.clone().unwrap_or_else(|| model.to_owned()),
        api_key: options.api_key.clone().filter(|key| !key.is_empty()),
        max_model_len: options.max_model_len.map(NonZeroUsize::get),
        max_num_seqs: options.max_num_seqs.map(NonZeroUsize::get),
        max_queue: options.max_queue.get(),
    };
    let address = listener.local_addr().context("failed to read the server's address")?;
    if !address.ip().is_loopback() && settings.api_key.is_none() {
        eprintln!("warning: other machines can send requests to {address} without a key; set --api-key");
    }
    eprintln!("serving {} at http://{address}/v1", settings.model_name);
    serve::serve(&lm, listener, &settings)
}
