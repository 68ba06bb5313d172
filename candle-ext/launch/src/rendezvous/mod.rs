//! The rendezvous of a job's nodes at a store. One of the nodes hosts the store, and the workers use it too.
//!
//! A single node runs the same code. Keys are `launch/JOB/GENERATION/...`. `store` opens the store. `join` agrees on
//! the participants of a generation. `peer_monitor` monitors the other nodes while workers run.

mod error;
mod heartbeats;
mod join;
mod node_rank;
mod node_record;
mod peer_monitor;
mod quorum;
mod store;

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use candlewick_comm::rank_env::Master;
use candlewick_comm::store::{Client, Error, Server, StoreSecret};

use crate::endpoint::{Endpoint, is_this_machine};
use crate::event::{Event, PeerEvent};
use crate::generation::{Generation, Participant};
use crate::node_resources::NodeResources;
use crate::plan::{LaunchPlan, RendezvousPlan};
use crate::values::NodeRange;

use error::Result;
pub use error::{Interrupted, POLL_INTERVAL, RendezvousError};
use node_rank::{NodeRank, key};
use node_record::{NodeRecord, RendezvousSettings};
pub use peer_monitor::PeerMonitor;
use peer_monitor::{PeerHeartbeats, PeerMonitorSettings};
use store::{ConnectTimeouts, address_of, bind, connect};

/// This node's connection to the rendezvous.
#[derive(Debug)]
pub struct Rendezvous {
    /// The store server on the host, for the launchers and the workers of the first generation.
    server: Option<Server>,
    store: Client,
    /// The address of the store.
    address: Endpoint,
    is_single_node: bool,
    /// The secret of the stores; `None` for stores without one.
    secret: Option<StoreSecret>,
    /// The store server for the workers of a later generation.
    workers_server: Option<Server>,
    nodes: NodeRange,
    plan: RendezvousPlan,
    monitor_interval: Duration,
    heartbeat_timeout: Duration,
    own: NodeRecord,
    /// This node's rank in the current generation.
    node_rank: Option<NodeRank>,
}

impl Rendezvous {
    /// Hosts the store, or connects to it.
    pub fn open(plan: &LaunchPlan, node_resources: &NodeResources, interrupted: Interrupted) -> Result<Self> {
        let (endpoint, timeout, is_host, is_host_certain) = match &plan.rendezvous {
            RendezvousPlan::Static { master, node_rank, timeout } => (master, *timeout, *node_rank == 0, true),
            RendezvousPlan::Dynamic(dynamic) => {
                let is_host = dynamic
                    .is_host
                    .unwrap_or_else(|| is_this_machine(&dynamic.endpoint.host, &node_resources.hostname));
                (&dynamic.endpoint, dynamic.join_timeout, is_host, dynamic.is_host.is_some())
            }
        };
        let is_single_node = plan.nodes.max <= 1;
        let secret = plan.store_secret.clone();
        let server = match is_host.then(|| bind(endpoint, is_single_node, secret.as_ref())).transpose() {
            // Two launchers on one machine may both be candidates. The first to bind the port is the host.
            Err(RendezvousError::PortInUse { .. }) if !is_host_certain && !is_single_node => None,
            server => server?,
        };
        let address = address_of(endpoint, server.as_ref(), is_single_node);
        let timeouts = ConnectTimeouts { connect: timeout, reply: plan.heartbeat_timeout.max(MIN_REPLY_TIMEOUT) };
        let store = connect(&address, secret.as_ref(), timeouts, interrupted)?;
        let own = Participant {
            host: plan.local_addr.clone().unwrap_or_else(|| node_resources.hostname.clone()),
            n_workers: plan.local_world_size,
            role: plan.role.clone(),
        };
        Ok(Self {
            server,
            store: store.with_prefix(&format!("launch/{}", plan.run_id)),
            address,
            secret,
            is_single_node,
            workers_server: None,
            nodes: plan.nodes,
            plan: plan.rendezvous.clone(),
            monitor_interval: plan.monitor_interval,
            heartbeat_timeout: plan.heartbeat_timeout,
            own: NodeRecord::new(own, RendezvousSettings::of(plan)),
            node_rank: None,
        })
    }

    /// Joins the next generation and waits until its participants are agreed on.
    pub fn next_generation(&mut self, interrupted: Interrupted) -> Result<Generation> {
        let before = self.node_rank.take().map(|node| node.generation);
        let (node, participants) = self.join(before, interrupted)?;
        self.node_rank = Some(node);
        let port = self.workers_port(node.generation, interrupted)?;
        let master = Master { addr: self.address.host.clone(), port, agent_hosts_store: true };
        Ok(Generation {
            number: node.generation,
            group_rank: node.group_rank,
            participants,
            master,
            store_secret: self.secret.clone(),
        })
    }

    /// Starts a new store for the workers of a later generation. An earlier store holds addresses of dead processes.
    fn serve_workers_of(&mut self, generation: usize) -> Result<()> {
        if generation == 0 || self.server.is_none() {
            return Ok(());
        }
        let endpoint = Endpoint { host: self.address.host.clone(), port: 0 };
        let server = bind(&endpoint, self.is_single_node, self.secret.as_ref())?;
        let port = server.port().to_string();
        self.workers_server = Some(server);
        self.store.set(&key(generation, "port"), port.as_bytes()).map_err(|source| self.store_error(source))
    }

    fn workers_port(&self, generation: usize, interrupted: Interrupted) -> Result<u16> {
        if generation == 0 {
            return Ok(self.address.port);
        }
        let key = key(generation, "port");
        let deadline = Instant::now() + self.join_timeout();
        while !self.store.check(&[&key]).map_err(|source| self.store_error(source))? {
            if Instant::now() >= deadline {
                return Err(self.join_timeout_error(
                    self.join_timeout(),
                    "the host did not publish the port of the workers' store".into(),
                ));
            }
            self.pause(interrupted)?;
        }
        let port = self.store.get(&key).map_err(|source| self.store_error(source))?;
        let port = String::from_utf8_lossy(&port).parse();
        port.map_err(|_| {
            self.join_timeout_error(
                self.join_timeout(),
                "the published port of the workers' store is not a number".into(),
            )
        })
    }

    /// Publishes an event of this node to the other nodes. Only the first event of each kind counts.
    pub fn publish(&self, peer: &PeerEvent) {
        let (Some(node), Some((name, text))) = (self.node_rank, peer_monitor::store_entry(peer)) else { return };
        if self.is_host() && !matches!(peer, PeerEvent::Failed(_)) {
            self.close_rendezvous(node);
        }
        // Without a store, the other nodes detect the loss themselves.
        let _ = self.store.compare_set(&node.key(name), b"", format!("{} {text}", node.group_rank).as_bytes());
    }

    /// Marks this generation as the last one, because the store host leaves.
    fn close_rendezvous(&self, node: NodeRank) {
        let _ = self.store.set(&node.key("closed"), b"1");
    }

    /// Starts monitoring the other nodes. Their events are sent to `events`.
    pub fn monitor_peers(&self, events: Sender<Event>) -> Result<Option<PeerMonitor>> {
        let Some(node) = self.node_rank.filter(|_| self.nodes.max > 1) else { return Ok(None) };
        let store =
            self.store.new_connection_with_timeout(self.store.timeout()).map_err(|source| self.store_error(source))?;
        Ok(Some(PeerMonitor::start(store, node, self.peer_monitor_settings(), events)))
    }

    /// Returns whether this node hosts the store.
    pub fn is_host(&self) -> bool {
        self.server.is_some()
    }

    /// Publishes that this node's workers succeeded.
    pub fn mark_done(&self) {
        if let Some(node) = self.node_rank {
            // An error means that the store is lost.
            let _ = self.store.add(&node.key("done"), 1);
        }
    }

    /// Returns whether workers of other nodes still run. They may need this node's store or a restart.
    pub fn are_peers_running(&self) -> bool {
        let n_done = |node: NodeRank| self.store.add(&node.key("done"), 0);
        self.node_rank.is_some_and(|node| n_done(node).is_ok_and(|n_done| n_done < node.n_nodes as i64))
    }

    /// Returns whether the job can continue after another node has left.
    pub fn can_continue_without_peer(&self) -> bool {
        let is_closed = |node: NodeRank| self.store.check(&[&node.key("closed")]).unwrap_or(true);
        let is_dynamic = matches!(self.plan, RendezvousPlan::Dynamic(_));
        is_dynamic && self.node_rank.is_some_and(|node| node.n_nodes > self.nodes.min && !is_closed(node))
    }

    /// Waits for a failure published by another node, at most for the heartbeat timeout.
    pub fn wait_for_peer_failure(&self, interrupted: Interrupted) -> Option<String> {
        let node = self.node_rank.filter(|node| node.n_nodes > 1)?;
        let deadline = Instant::now() + self.heartbeat_timeout;
        while Instant::now() < deadline && interrupted().is_none() {
            if let Some(text) = peer_monitor::read_peer_event(&self.store, node, "failed").ok()? {
                return Some(text);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        None
    }

    /// Leaves the job. The store host waits until the other nodes have left, so that they can read the last events.
    pub fn shutdown(self, interrupted: Interrupted) {
        let Some(node) = self.node_rank else { return };
        let _ = self.store.set(&node.node_key("gone", node.group_rank), b"1");
        if !self.is_host() {
            return;
        }
        self.close_rendezvous(node);
        let mut heartbeats = PeerHeartbeats::new(node, self.heartbeat_timeout);
        while heartbeats.are_peers_alive(&self.store) && interrupted().is_none() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn peer_monitor_settings(&self) -> PeerMonitorSettings {
        let max_nodes = match self.plan {
            RendezvousPlan::Static { .. } => None,
            RendezvousPlan::Dynamic(_) => Some(self.nodes.max),
        };
        PeerMonitorSettings { max_nodes, interval: self.monitor_interval, heartbeat_timeout: self.heartbeat_timeout }
    }

    /// Returns the timeout of the rendezvous.
    fn join_timeout(&self) -> Duration {
        match &self.plan {
            RendezvousPlan::Static { timeout, .. } => *timeout,
            RendezvousPlan::Dynamic(dynamic) => dynamic.join_timeout,
        }
    }

    fn store_error(&self, source: Error) -> RendezvousError {
        RendezvousError::Store { endpoint: self.address.clone(), source: Box::new(source) }
    }

    fn join_timeout_error(&self, timeout: Duration, missing: String) -> RendezvousError {
        RendezvousError::JoinTimeout { min: self.nodes.min, endpoint: self.address.clone(), timeout, missing }
    }

    fn pause(&self, interrupted: Interrupted) -> Result<()> {
        std::thread::sleep(POLL_INTERVAL);
        interrupted().map_or(Ok(()), |signal| Err(RendezvousError::Interrupted(signal)))
    }
}

/// The shortest reply timeout of the store. It is the heartbeat timeout otherwise; a host under load may need longer.
const MIN_REPLY_TIMEOUT: Duration = Duration::from_secs(5);
