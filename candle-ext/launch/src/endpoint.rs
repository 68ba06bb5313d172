//! Endpoints: a host and a port.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, ToSocketAddrs, UdpSocket};

/// The address of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Host name or IP address; an IPv6 address has no brackets.
    pub host: String,
    /// Port; 0 selects a free one.
    pub port: u16,
}

impl Endpoint {
    /// Parses `host`, `host:port`, `[v6]` or `[v6]:port`.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, String> {
        let text = text.trim();
        let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, rest)) => {
                (host, Some(rest.strip_prefix(':').ok_or_else(|| format!("`{rest}` is not `:PORT`"))?))
            }
            None if text.parse::<Ipv6Addr>().is_ok() => (text, None),
            None => text.rsplit_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
        };
        let is_host = |c: char| c.is_alphanumeric() || "_.:-%".contains(c);
        if host.is_empty() || !host.chars().all(is_host) {
            return Err(format!("`{host}` is not a host"));
        }
        let parse = |port: &str| port.parse().map_err(|_| format!("`{port}` is not a port"));
        Ok(Self { host: host.to_owned(), port: port.map_or(Ok(default_port), parse)? })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// Returns whether `host` names this machine, whose host name is `own_name`.
pub fn is_this_machine(host: &str, own_name: &str) -> bool {
    if host == "localhost" || host == own_name {
        return true;
    }
    let Ok(addresses) = (host, 0u16).to_socket_addrs() else { return false };
    addresses.map(|address| address.ip()).any(is_own_address)
}

/// Returns whether an address belongs to this machine: a socket can be bound to it.
fn is_own_address(address: IpAddr) -> bool {
    address.is_loopback() || (!address.is_unspecified() && UdpSocket::bind((address, 0)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: &str) {
        let got = Endpoint::parse(text, 29400).map(|endpoint| endpoint.to_string());
        assert_eq!(got.unwrap_or_else(|error| error), want);
    }

    #[test]
    fn the_port_of_an_endpoint_is_optional() {
        check("node0:1234", "node0:1234");
        check("node0", "node0:29400");
        check(" 10.0.0.1:0 ", "10.0.0.1:0");
        check("[::1]:5", "[::1]:5");
        check("[fe80::1%eth0]", "[fe80::1%eth0]:29400");
        check("fe80::1", "[fe80::1]:29400");
    }

    #[test]
    fn an_invalid_endpoint_is_rejected() {
        check("node0:70000", "`70000` is not a port");
        check("node0:", "`` is not a port");
        check("http://node0:1", "`http://node0` is not a host");
        check(":5", "`` is not a host");
        check("[::1]5", "`5` is not `:PORT`");
    }

    #[test]
    fn this_machine_is_recognized_by_name_and_address() {
        for host in ["localhost", "127.0.0.1", "127.1.2.3", "me"] {
            assert!(is_this_machine(host, "me"), "{host}");
        }
        for host in ["192.0.2.1", "no such host"] {
            assert!(!is_this_machine(host, "me"), "{host}");
        }
    }
}
