//! The rendezvous of a job's nodes at a store that one of them hosts, which the workers use too. One node alone takes the
//! same path.
//!
//! Keys are `launch/JOB/GENERATION/...`. `store` opens the store, `join` agrees on the participants of a generation, `watch`
//! follows the other nodes while workers run.

mod error;
mod heartbeats;
mod join;
mod node_rank;
mod node_record;
mod quorum;
mod store;
mod watch;

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use candlewick_comm::rank_env::Master;
use candlewick_comm::store::{Client, Error, Server};

use crate::endpoint::{Endpoint, is_this_machine};
use crate::event::{Event, Peer};
use crate::generation::{Generation, Participant};
use crate::host::Host;
use crate::plan::{Plan, RendezvousPlan};
use crate::values::NodeRange;

use error::Result;
pub use error::{Interrupted, RendezvousError, SLICE};
use node_rank::{NodeRank, key};
use node_record::{NodeRecord, RendezvousSettings};
use store::{address_of, bind, connect};
pub use watch::Watch;
use watch::{PeerHeartbeats, WatchSettings};

/// A node at the store.
#[derive(Debug)]
pub struct Rendezvous {
    /// Serves the other launchers, and the workers of the first generation; kept until they have left.
    server: Option<Server>,
    store: Client,
    /// The address of `server`.
    address: Endpoint,
    is_only: bool,
    /// Serves the workers of the present generation, if it is not the first.
    workers_server: Option<Server>,
    nodes: NodeRange,
    plan: RendezvousPlan,
    monitor_interval: Duration,
    keep_alive: Duration,
    own: NodeRecord,
    /// This node's number in the present generation.
    node_rank: Option<NodeRank>,
}

impl Rendezvous {
    /// Hosts the store, or connects to it.
    pub fn open(plan: &Plan, host: &Host, interrupted: Interrupted) -> Result<Self> {
        let (endpoint, timeout, is_host, is_certain) = match &plan.rendezvous {
            RendezvousPlan::Static { master, node_rank, timeout } => (master, *timeout, *node_rank == 0, true),
            RendezvousPlan::Dynamic(dynamic) => {
                let is_host = dynamic.is_host.unwrap_or_else(|| is_this_machine(&dynamic.endpoint.host, &host.name));
                (&dynamic.endpoint, dynamic.join, is_host, dynamic.is_host.is_some())
            }
        };
        let is_only = plan.nodes.max <= 1;
        let server = match is_host.then(|| bind(endpoint, is_only)).transpose() {
            // Two launchers of one machine find that both could host; one of them does.
            Err(RendezvousError::PortInUse { .. }) if !is_certain && !is_only => None,
            server => server?,
        };
        let address = address_of(endpoint, server.as_ref(), is_only);
        let store = connect(&address, timeout, plan.keep_alive.max(SHORTEST_ANSWER), interrupted)?;
        let own = Participant {
            host: plan.local_addr.clone().unwrap_or_else(|| host.name.clone()),
            n_workers: plan.local_world_size,
            role: plan.role.clone(),
        };
        Ok(Self {
            server,
            store: store.with_prefix(&format!("launch/{}", plan.run_id)),
            address,
            is_only,
            workers_server: None,
            nodes: plan.nodes,
            plan: plan.rendezvous.clone(),
            monitor_interval: plan.monitor_interval,
            keep_alive: plan.keep_alive,
            own: NodeRecord::new(own, RendezvousSettings::of(plan)),
            node_rank: None,
        })
    }

    /// Waits until the nodes have agreed on the participants of the next generation, and returns it.
    pub fn next_generation(&mut self, interrupted: Interrupted) -> Result<Generation> {
        let before = self.node_rank.take().map(|node| node.generation);
        let (node, participants) = self.join(before, interrupted)?;
        self.node_rank = Some(node);
        let port = self.workers_port(node.generation, interrupted)?;
        let master = Master { addr: self.address.host.clone(), port, agent_hosts_store: true };
        Ok(Generation { number: node.generation, group_rank: node.group_rank, participants, master })
    }

    /// Serves the workers of a later generation a store of their own. The addresses in an earlier one are of processes that
    /// are dead.
    fn serve_workers_of(&mut self, generation: usize) -> Result<()> {
        if generation == 0 || self.server.is_none() {
            return Ok(());
        }
        let server = bind(&Endpoint { host: self.address.host.clone(), port: 0 }, self.is_only)?;
        let port = server.port().to_string();
        self.workers_server = Some(server);
        self.store.set(&key(generation, "port"), port.as_bytes()).map_err(|source| self.lost(source))
    }

    fn workers_port(&self, generation: usize, interrupted: Interrupted) -> Result<u16> {
        if generation == 0 {
            return Ok(self.address.port);
        }
        let key = key(generation, "port");
        let deadline = Instant::now() + self.patience();
        while !self.store.check(&[&key]).map_err(|source| self.lost(source))? {
            if Instant::now() >= deadline {
                return Err(self.missing(self.patience(), "the host's store for the workers".into()));
            }
            self.pause(interrupted)?;
        }
        let port = self.store.get(&key).map_err(|source| self.lost(source))?;
        let port = String::from_utf8_lossy(&port).parse();
        port.map_err(|_| self.missing(self.patience(), "a number for the port of the workers' store".into()))
    }

    /// Tells the others what happened here. Of each kind the first is believed.
    pub fn tell(&self, peer: &Peer) {
        let (Some(node), Some((name, text))) = (self.node_rank, watch::told(peer)) else { return };
        if self.is_host() && !matches!(peer, Peer::Failed(_)) {
            self.close(node);
        }
        // Without a store the others notice by themselves.
        let _ = self.store.compare_set(&node.key(name), b"", format!("{} {text}", node.group_rank).as_bytes());
    }

    /// Says that there will be no other generation, because its store will be gone.
    fn close(&self, node: NodeRank) {
        let _ = self.store.set(&node.key("closed"), b"1");
    }

    /// Looks after the other nodes while workers run; what happens there goes to `events`.
    pub fn watch(&self, events: Sender<Event>) -> Result<Option<Watch>> {
        let Some(node) = self.node_rank.filter(|_| self.nodes.max > 1) else { return Ok(None) };
        let store = self.store.reconnect_within(self.store.timeout()).map_err(|source| self.lost(source))?;
        Ok(Some(Watch::start(store, node, self.watch_settings(), events)))
    }

    /// Says whether this node hosts the store.
    pub fn is_host(&self) -> bool {
        self.server.is_some()
    }

    /// Says that this node's workers have ended well.
    pub fn say_done(&self) {
        if let Some(node) = self.node_rank {
            // Without a store there is no rendezvous to report to.
            let _ = self.store.add(&node.key("done"), 1);
        }
    }

    /// Says whether workers of other nodes run: they may need this node's store or ranks.
    pub fn are_others_busy(&self) -> bool {
        let n_done = |node: NodeRank| self.store.add(&node.key("done"), 0);
        self.node_rank.is_some_and(|node| n_done(node).is_ok_and(|n_done| n_done < node.n_nodes as i64))
    }

    /// Says whether the job goes on when another node has left for good.
    pub fn can_go_on(&self) -> bool {
        let is_closed = |node: NodeRank| self.store.check(&[&node.key("closed")]).unwrap_or(true);
        let is_dynamic = matches!(self.plan, RendezvousPlan::Dynamic(_));
        is_dynamic && self.node_rank.is_some_and(|node| node.n_nodes > self.nodes.min && !is_closed(node))
    }

    /// Waits for another node to say that its workers failed, as long as a living node takes at most.
    pub fn wait_for_failure(&self, interrupted: Interrupted) -> Option<String> {
        let node = self.node_rank.filter(|node| node.n_nodes > 1)?;
        let deadline = Instant::now() + self.keep_alive;
        while Instant::now() < deadline && interrupted().is_none() {
            if let Some(text) = watch::heard(&self.store, node, "failed").ok()? {
                return Some(text);
            }
            std::thread::sleep(SLICE);
        }
        None
    }

    /// Goes for good. The host waits until the others have gone, so that they hear what there is to hear.
    pub fn leave(self, interrupted: Interrupted) {
        let Some(node) = self.node_rank else { return };
        let _ = self.store.set(&node.node_key("gone", node.group_rank), b"1");
        if !self.is_host() {
            return;
        }
        self.close(node);
        let mut heartbeats = PeerHeartbeats::new(node, self.keep_alive);
        while heartbeats.are_others_here(&self.store) && interrupted().is_none() {
            std::thread::sleep(SLICE);
        }
    }

    fn watch_settings(&self) -> WatchSettings {
        let n_most = match self.plan {
            RendezvousPlan::Static { .. } => None,
            RendezvousPlan::Dynamic(_) => Some(self.nodes.max),
        };
        WatchSettings { n_most, interval: self.monitor_interval, keep_alive: self.keep_alive }
    }

    /// Returns the longest wait for the other nodes.
    fn patience(&self) -> Duration {
        match &self.plan {
            RendezvousPlan::Static { timeout, .. } => *timeout,
            RendezvousPlan::Dynamic(dynamic) => dynamic.join,
        }
    }

    fn lost(&self, source: Error) -> RendezvousError {
        RendezvousError::Store { endpoint: self.address.clone(), source: Box::new(source) }
    }

    fn missing(&self, timeout: Duration, missing: String) -> RendezvousError {
        RendezvousError::Missing { min: self.nodes.min, endpoint: self.address.clone(), timeout, missing }
    }

    fn pause(&self, interrupted: Interrupted) -> Result<()> {
        std::thread::sleep(SLICE);
        interrupted().map_or(Ok(()), |signal| Err(RendezvousError::Interrupted(signal)))
    }
}

/// A host that cannot be reached is waited for as long as a node may be silent; one under load may need as long as this.
const SHORTEST_ANSWER: Duration = Duration::from_secs(5);
