// Asks for each address with Java's own client and nothing set in code.
// Prints a line for each: `answered ADDRESS BODY` or `failed ADDRESS REASON`.
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;

public class Trust {
    public static void main(String[] addresses) throws InterruptedException {
        var client = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(10)).build();
        for (var address : addresses) {
            var request = HttpRequest.newBuilder(URI.create(address)).timeout(Duration.ofSeconds(20)).build();
            try {
                var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
                var result = answer.statusCode() == 200 ? "answered " : "failed ";
                System.out.println(result + address + " " + answer.body().replaceAll("\\s+", " "));
            } catch (IOException error) {
                System.out.println("failed " + address + " " + error);
            }
        }
    }
}
