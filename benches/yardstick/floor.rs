//! The floor: what a proxy made of hyper costs when it puts in a header and does nothing else.

use std::io;
use std::path::Path;
use std::time::Duration;

use http::header::{AUTHORIZATION, CONNECTION, HOST};
use http::{HeaderValue, Request, Uri};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::TcpListener;

use super::{Result, certs, say};

type Upstream = Client<HttpsConnector<HttpConnector>, Incoming>;

/// Serves on a port of loopback, which it prints, and forwards all to `upstream`.
pub(crate) async fn serve(upstream: Uri, certs: &Path) -> Result<()> {
    let client = client(certs)?;
    let host = HeaderValue::from_str(upstream.authority().map_or("", |authority| authority.as_str()))?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    say(&listener.local_addr()?.port().to_string());
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true); // a slower answer is all that could come of it
        let (client, upstream, host) = (client.clone(), upstream.clone(), host.clone());
        let answer = service_fn(move |request| {
            let sent = inject(request, &upstream, &host).map(|request| client.request(request));
            async {
                let mut answer = sent.map_err(io::Error::other)?.await.map_err(io::Error::other)?;
                answer.headers_mut().remove(CONNECTION);
                Ok::<_, io::Error>(answer)
            }
        });
        let http = hyper::server::conn::http1::Builder::new();
        tokio::spawn(async move { http.serve_connection(TokioIo::new(stream), answer).await });
    }
}

fn client(certs: &Path) -> Result<Upstream> {
    let mut http = HttpConnector::new();
    http.set_nodelay(true);
    http.enforce_http(false);
    let tls = HttpsConnectorBuilder::new()
        .with_tls_config(certs::client(certs)?)
        .https_or_http()
        .enable_http1()
        .wrap_connector(http);
    let mut client = Client::builder(TokioExecutor::new());
    client.pool_timer(TokioTimer::new()).pool_idle_timeout(Duration::from_mins(1));
    Ok(client.build(tls))
}

fn inject(
    mut request: Request<Incoming>,
    upstream: &Uri,
    host: &HeaderValue,
) -> std::result::Result<Request<Incoming>, http::Error> {
    let mut parts = upstream.clone().into_parts();
    parts.path_and_query = request.uri().path_and_query().cloned();
    *request.uri_mut() = Uri::from_parts(parts)?;
    let headers = request.headers_mut();
    headers.remove(CONNECTION);
    headers.insert(AUTHORIZATION, HeaderValue::from_static("Bearer sk-floor-0123456789abcdef"));
    headers.insert(HOST, host.clone());
    Ok(request)
}
