//! What `lessor run` says when it is ready: what is served, where, and lines to paste.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::config::{Address, Config, Provider};

/// The admin API's two doors, as really bound.
#[derive(Debug, Clone, Copy, Default)]
pub struct Doors<'a> {
    /// The TCP listener.
    pub tcp: Option<&'a Address>,
    /// The Unix socket.
    pub socket: Option<&'a Path>,
    /// The local CA's certificate, where there is one.
    pub ca: Option<&'a Path>,
}

/// The start-up block, with a line end at its end. `bound` are the proxy's listeners, as really bound.
pub fn banner(config: &Config, bound: &[Address], admin: Doors<'_>) -> String {
    let mut page = Page(String::new());
    page.row("lessor", &format!("{}, by {}", env!("CARGO_PKG_VERSION"), config.origin));
    page.rows("serving", &serving(config));
    page.row("store", &config.store.url.to_string());
    page.rows("proxy", &bound.iter().map(shown).collect::<Vec<_>>());
    let socket = admin.socket.map(|path| format!("unix:{}", path.display()));
    page.rows("admin", &admin.tcp.map(shown).into_iter().chain(socket).collect::<Vec<_>>());
    if let Some(ca) = admin.ca {
        page.row("ca", &ca.display().to_string());
    }
    page.rows("try", &lines_to_try(config, bound, admin.ca.is_some()));
    page.rows("note", &open_to(config, bound));
    for warning in &config.warnings {
        page.row("warning", warning);
    }
    page.0
}

/// Who may use the pool without being known, and what to add against it; one line a kind of listener.
pub fn open_to(config: &Config, bound: &[Address]) -> Vec<String> {
    if !config.apps.is_empty() {
        return Vec::new();
    }
    let mut notes = Vec::new();
    if bound.iter().any(|at| matches!(at, Address::Tcp(at) if at.ip().is_loopback())) {
        notes.push("every local process can use this pool; give callers tokens with [apps.NAME]".to_owned());
    }
    for at in bound {
        let Address::Unix(path, mode) = at else { continue };
        // To connect takes the right to write.
        let who = match mode & 0o022 {
            0 => continue,
            0o020 => "every user of its group",
            _ => "every user",
        };
        notes.push(format!(
            "{who} that reaches unix:{} (mode {mode:04o}) can use this pool; tell callers apart by `uid` or `token` \
             in [apps.NAME], or leave the mode at 0600",
            path.display()
        ));
    }
    notes
}

struct Page(String);

impl Page {
    fn row(&mut self, label: &str, text: &str) {
        // Writing to a `String` cannot fail. A control character would let a file's name write lines.
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let _ = writeln!(self.0, "{label:<9}{text}");
    }

    fn rows(&mut self, label: &str, rows: &[String]) {
        for (at, row) in rows.iter().enumerate() {
            self.row(if at == 0 { label } else { "" }, row);
        }
    }
}

/// One line a provider: how many keys, in which pools.
fn serving(config: &Config) -> Vec<String> {
    let wide = config.providers.keys().map(|name| name.as_str().len()).max().unwrap_or(0);
    let lines = config.providers.keys().map(|name| {
        let keys: Vec<_> = config.keys.iter().filter(|key| key.provider == *name).collect();
        let pools: BTreeSet<_> = keys.iter().map(|key| key.pool.as_str()).collect();
        let pools: Vec<_> = pools.into_iter().collect();
        let count = match keys.len() {
            0 => return format!("{:<wide$}  no keys", name.as_str()),
            1 => "1 key".to_owned(),
            many => format!("{many} keys"),
        };
        let word = if pools.len() == 1 { "pool" } else { "pools" };
        format!("{:<wide$}  {count}, {word} {}", name.as_str(), pools.join(", "))
    });
    let lines: Vec<_> = lines.collect();
    if lines.is_empty() { vec!["nothing: no provider has a key".into()] } else { lines }
}

fn shown(at: &Address) -> String {
    match at {
        Address::Tcp(at) => format!("http://{at}"),
        unix @ Address::Unix(..) => unix.to_string(),
    }
}

/// Lines that work as they stand, for the first TCP listener, else for the first socket.
fn lines_to_try(config: &Config, bound: &[Address], ca: bool) -> Vec<String> {
    let served = |name: &str| config.providers.get(name).filter(|it| has_key(config, it));
    let first = served("openai")
        .or_else(|| served("anthropic"))
        .or_else(|| config.providers.values().find(|it| has_key(config, it)));
    let Some(first) = first else { return Vec::new() };
    let path = check_path(first);
    // With apps configured a caller's placeholder key is its token, which is not ours to show.
    let by_token = config.apps.iter().any(|app| app.token.is_some());
    let (key, header) =
        if by_token { ("\"$APP_TOKEN\"", " -H \"X-Lessor-App-Token: $APP_TOKEN\"") } else { ("lessor", "") };
    let tcp = bound.iter().find_map(|at| match at {
        Address::Tcp(at) => Some(reachable(*at)),
        Address::Unix(..) => None,
    });
    let Some(at) = tcp else {
        let socket = bound.iter().find_map(|at| match at {
            Address::Unix(path, _) => Some(path.display()),
            Address::Tcp(_) => None,
        });
        let line =
            |socket| format!("curl{header} --unix-socket {socket} http://localhost/{}{path}", first.name);
        return socket.map(line).into_iter().collect();
    };
    let mut lines = vec![format!("curl{header} http://{at}/{}{path}", first.name)];
    if let Some(host) = first.base_url.authority() {
        let base = first.base_url.path().trim_end_matches('/');
        lines.push(format!("curl{header} -x http://{at} http://{host}{base}{path}"));
        // The app is told on the CONNECT itself, where curl sends no header of `-H`.
        let user = if by_token { ":\"$APP_TOKEN\"@" } else { "" };
        if ca && first.base_url.scheme_str() == Some("https") {
            lines.push(format!(
                "curl -x http://{user}{at} --cacert \"$(lessor ca path)\" https://{host}{base}{path}"
            ));
        }
    }
    for (name, variables, rest) in [("openai", "OPENAI", "/v1"), ("anthropic", "ANTHROPIC", "")] {
        if let Some(provider) = served(name) {
            lines.push(format!(
                "{variables}_BASE_URL=http://{at}/{}{rest} {variables}_API_KEY={key} python app.py",
                provider.name
            ));
        }
    }
    lines
}

fn has_key(config: &Config, provider: &Provider) -> bool {
    config.keys.iter().any(|key| key.provider == provider.name)
}

/// A path that a plain GET may ask for, without query: `&` would need quoting.
fn check_path(provider: &Provider) -> &str {
    let get = provider.check.as_ref().filter(|check| check.method == http::Method::GET);
    get.map_or("/", |check| check.path.split('?').next().unwrap_or("/"))
}

/// An address that a client on this host can use: `0.0.0.0` is none.
fn reachable(mut at: SocketAddr) -> SocketAddr {
    if at.ip().is_unspecified() {
        at.set_ip(match at.ip() {
            IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    at
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;
    use crate::config::AppConfig;
    use crate::control::admin::tests::{config, provider};
    use crate::model::{AppName, Secret};

    fn tcp(at: &str) -> Vec<Address> {
        vec![Address::Tcp(at.parse().unwrap())]
    }

    #[test]
    fn the_start_says_what_is_served_where_and_how_to_use_it() {
        let admin = Address::Tcp("127.0.0.1:8322".parse().unwrap());
        let doors = Doors {
            tcp: Some(&admin),
            socket: Some(Path::new("/run/lessor/lessor-40404.sock")),
            ca: Some(Path::new("/run/lessor/lessor-40404.ca.pem")),
        };
        let mut config = config();
        config.warnings = vec!["OPENAI_API_KEY is in the environment".into()];
        let expected = format!(
            "\
lessor   {}, by config/lessor.toml
serving  openai  2 keys, pool default
store    memory:
proxy    http://127.0.0.1:40404
admin    http://127.0.0.1:8322
         unix:/run/lessor/lessor-40404.sock
ca       /run/lessor/lessor-40404.ca.pem
try      curl http://127.0.0.1:40404/openai/v1/models
         curl -x http://127.0.0.1:40404 http://api.openai.com/v1/models
         curl -x http://127.0.0.1:40404 --cacert \"$(lessor ca path)\" https://api.openai.com/v1/models
         OPENAI_BASE_URL=http://127.0.0.1:40404/openai/v1 OPENAI_API_KEY=lessor python app.py
note     every local process can use this pool; give callers tokens with [apps.NAME]
warning  OPENAI_API_KEY is in the environment
",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(banner(&config, &tcp("127.0.0.1:40404"), doors), expected);
    }

    #[test]
    fn anthropic_is_shown_where_it_is_served_and_its_base_url_has_no_v1() {
        let mut config = config();
        config.providers =
            [provider("anthropic", "https://api.anthropic.com", Some("/v1/models?limit=1"))].into();
        for key in &mut config.keys {
            key.provider = "anthropic".parse().unwrap();
        }
        let page = banner(&config, &tcp("0.0.0.0:8321"), Doors::default());
        assert!(page.contains("curl http://127.0.0.1:8321/anthropic/v1/models\n"), "{page}");
        assert!(
            page.contains(
                "ANTHROPIC_BASE_URL=http://127.0.0.1:8321/anthropic ANTHROPIC_API_KEY=lessor python app.py"
            ),
            "{page}"
        );
        assert!(!page.contains("OPENAI") && !page.contains("every local process"), "{page}");
    }

    #[test]
    fn with_apps_no_token_is_shown_and_the_pool_is_not_called_open() {
        let mut config = config();
        config.apps = vec![AppConfig {
            name: AppName::parse("checkout").unwrap(),
            token: Some(Secret::new("t0ken-canary".into())),
            uid: None,
            pools: Vec::new(),
            providers: Vec::new(),
        }];
        let page = banner(&config, &tcp("127.0.0.1:8321"), Doors::default());
        assert!(page.contains("OPENAI_API_KEY=\"$APP_TOKEN\""), "{page}");
        assert!(!page.contains("canary") && !page.contains("every local process"), "{page}");
    }

    #[test]
    fn a_socket_alone_is_shown_with_curls_way_to_reach_it() {
        let page = banner(&config(), &[Address::Unix("/run/p.sock".into(), 0o600)], Doors::default());
        assert!(page.contains("curl --unix-socket /run/p.sock http://localhost/openai/v1/models"), "{page}");
        assert!(page.contains("proxy    unix:/run/p.sock"), "{page}");
    }

    #[test]
    fn a_socket_that_others_may_open_is_told_with_what_to_add() {
        let at = |mode| [Address::Unix("/run/p.sock".into(), mode)];
        assert!(open_to(&config(), &at(0o600)).is_empty());
        let all = open_to(&config(), &at(0o666)).concat();
        assert!(all.starts_with("every user that reaches unix:/run/p.sock (mode 0666)"), "{all}");
        assert!(all.contains("`uid`") && all.contains("[apps.NAME]"), "{all}");
        assert!(open_to(&config(), &at(0o660)).concat().starts_with("every user of its group"));
    }

    #[test]
    fn nothing_served_is_said_and_nothing_is_offered_to_try() {
        let mut config = config();
        (config.keys, config.providers) = (Vec::new(), std::collections::BTreeMap::new());
        let page = banner(&config, &tcp("127.0.0.1:8321"), Doors::default());
        assert!(page.contains("nothing: no provider has a key") && !page.contains("curl"), "{page}");
    }
}
